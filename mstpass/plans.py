"""Every type that passes between stages: plain frozen data that names nodes by string."""

from __future__ import annotations

import dataclasses

from mstpass.graph.tokens import Spec

FUSED, RECOMPUTE, SAVE = "fused", "recompute", "save"


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A part that is large but was not taken: why, and what a user can change (``fix``).

    ``fix`` is empty where nothing is known to help. ``node`` is the one that stood in the way,
    ``source`` and ``bytes`` are those of the part.
    """

    stage: str
    node: str
    reason: str
    source: str = ""
    bytes: int = 0
    fix: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.node}{where}: {self.reason}" + (f"; {self.fix}" if self.fix else "")


@dataclasses.dataclass(frozen=True)
class Region:
    """A set of token-parallel nodes with large intermediates, before it is decided how to run it.

    Attributes:
        members: all nodes, in the graph's order, each with its token dims (None: summed over
            tokens).
        unit: fused regions only: the scalar that the backward part is linear in. The loop runs
            with 1 in its place and the results are multiplied by it afterwards.
        prelude: backward nodes between the unit and the region; they run before the loop, with 1
            in the unit's place.
        outputs: members that nodes outside use.
        returned: large ones of them, which the step itself returns.
        symbolic: the token count varies from batch to batch; ``num_tokens`` is that of the batch
            the graph was traced with.
    """

    kind: str
    source: str
    num_tokens: int
    width: int
    fused: bool
    members: tuple[tuple[str, Spec | None], ...]
    outputs: tuple[str, ...]
    backward: frozenset[str]
    unit: str | None
    prelude: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    note: str = ""
    symbolic: bool = False

    @property
    def name(self) -> str:
        return self.members[0][0]


@dataclasses.dataclass(frozen=True)
class LoopInput:
    node: str
    spec: Spec  # empty: every chunk gets the whole value


@dataclasses.dataclass(frozen=True)
class LoopOutput:
    node: str
    spec: Spec | None  # None: summed over chunks
    scaled: bool = False  # fused: multiplied by the unit scalar after the loop


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """One loop over chunks: what it computes from what.

    ``members`` are in the graph's order. ``unit`` names the scalar that is 1 inside the loop, and
    in the nodes of ``prelude``, which are written again before the loop.
    """

    phase: str  # "forward" | "backward"
    members: tuple[str, ...]
    inputs: tuple[LoopInput, ...]
    outputs: tuple[LoopOutput, ...]
    unit: str | None = None
    prelude: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """A region, its mode and its loops. The public ``region`` of a report.

    ``bytes_before`` counts the large results of the region's matrix products at full length;
    ``bytes_after`` those of one chunk and what is kept of them for the backward.

    Where the token count is ``symbolic``, ``num_tokens`` and ``num_chunks`` are those of the batch
    that the graph was traced with, and ``chunk_tokens`` is the most that a chunk holds: the loop
    makes its chunks equal for the batch at hand (loop.py).
    """

    kind: str
    mode: str
    source: str
    num_tokens: int
    chunk_tokens: int
    num_chunks: int
    bytes_before: int
    bytes_after: int
    loops: tuple[LoopPlan, ...]
    saved: tuple[str, ...]
    members: tuple[tuple[str, Spec | None], ...]
    note: str = ""
    symbolic: bool = False

    def __post_init__(self) -> None:
        if self.symbolic:
            return
        if not 1 <= self.chunk_tokens <= self.num_tokens:
            raise ValueError(f"chunk_tokens={self.chunk_tokens} of {self.num_tokens} tokens")
        if (self.num_chunks - 1) * self.chunk_tokens >= self.num_tokens or (
            self.num_chunks * self.chunk_tokens < self.num_tokens
        ):
            raise ValueError(f"{self.num_chunks} chunks of {self.chunk_tokens} tokens do not cover")


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A value that crosses from forward to backward.

    ``node`` is its name in the final forward, ``value`` the joint graph's node that it is, such as
    one that a loop returns; empty for what a plan adds, such as a mask packed into bits.
    """

    node: str
    bytes: int
    source: str = ""
    value: str = ""


@dataclasses.dataclass(frozen=True)
class Reconstructed:
    """A value that does not cross, or crosses in fewer bytes: backward has it by other means.

    Attributes:
        node: the value.
        sources: what it is had from.
        rule: the rules' names, in the order in which they apply.
        grade: ``"exact"`` or ``"tolerant"``.
        bytes: saved bytes won, net of what is saved in its place.
        bounds: the error that each tolerant step may add.
    """

    node: str
    sources: tuple[str, ...]
    rule: str
    grade: str
    bytes: int
    bounds: tuple[str, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.node}{where}: {self.rule}, {self.grade}"


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """What crosses from forward to backward, by name, and the bytes of it by storage.

    ``nested`` values do not cross: backward recomputes them in passes of their own, and once more
    what they are computed from (schedule/nested_recomputation.py).
    """

    saved: tuple[SavedValue, ...]
    solver: str
    reconstructed: tuple[Reconstructed, ...] = ()
    nested: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(v.bytes for v in self.saved)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of the pipeline decided for one joint graph.

    ``peak_bytes`` is simulated, of forward and backward; symbolic sizes count as when traced. None
    where a size depends on data. ``baseline_peak_bytes`` is that of the step without loops, as few
    bytes saved as without repeating a heavy op; ``extra_time`` the time beyond that step's, a
    fraction of it, by the cost model.

    ``scheduled_peak_bytes`` is what Inductor's schedule of the compiled graphs needs
    (memory/inductor_schedule.py); None before compilation, and where it could not be read.
    ``limit_bytes``: the highest simulated peak that the plan might have; None without
    a budget in bytes.
    """

    regions: tuple[ChunkPlan, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    save_plan: SavePlan | None = None
    peak_bytes: int | None = None
    baseline_peak_bytes: int | None = None
    extra_time: float | None = None
    notes: tuple[str, ...] = ()
    scheduled_peak_bytes: int | None = None
    limit_bytes: int | None = None
