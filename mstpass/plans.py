"""The decisions that stages hand on: plain frozen data that names nodes by string.

A ``Region`` is found, a ``ChunkPlan`` says how it runs, a ``SavePlan`` says what crosses from
forward to backward, and an ``Outcome`` holds all of one joint graph. A ``Rejection`` says why a
large part was left as it is.

A ``Spec`` (graph/axes.py) says where a value holds the tokens, or the heads, that a loop runs over.
"""

from __future__ import annotations

import dataclasses

from mstpass.graph.advice import fix_of
from mstpass.graph.axes import TOKENS
from mstpass.graph.collectives import Collectives
from mstpass.graph.tokens import Spec
from mstpass.problem.problem import pinned_bytes

FLOAT32, INPUT = "float32", "input"  # ``LoopPlan.accumulate``
AUTO = "auto"  # the option of this name: one of them for each loop
# A sum kept in 16 bits is rounded once for each chunk, and eager's once. With the roundings that
# eager has besides (logits, activations and their gradients), the error of a weight's gradient
# against float64 was, relative to eager's (bfloat16, 25 heads and 4 MLPs of random values,
# 2026-11-27):
#     chunks    2             3             4             8
#     error     1.02 - 1.26   1.04 - 1.43   1.05 - 1.57   1.12 - 2.09
MOST_CHUNKS_IN_16_BITS = 2
ERROR_IN_16_BITS = 1.3  # times eager's own, at most


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A large part of the graph that does not run in chunks.

    Attributes:
        stage: the stage of the pipeline that refused it.
        node: the node that stood in the way.
        reason: why it did.
        source: where the part is in the user's model.
        bytes: size of the part's large results.
        fix: what the user can change, by default the advice of the reason (graph/advice.py).
    """

    stage: str
    node: str
    reason: str
    source: str = ""
    bytes: int = 0
    fix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fix", self.fix or fix_of(self.reason))

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.node}{where}: {self.reason}" + (f"; {self.fix}" if self.fix else "")


@dataclasses.dataclass(frozen=True)
class Region:
    """A set of token-parallel nodes with large intermediates. How it runs is not decided yet.

    Attributes:
        kind: ``"lm_head"``, ``"mlp"`` or ``"segment"``.
        width: features per token of the region's widest result.
        fused: forward and backward can run as one loop.
        members: all nodes in the graph's order, each with its token dims (None: it is reduced over
            tokens, to a sum or a maximum, for example).
        outputs: the members that nodes outside the region read.
        returned: the large outputs that the step itself returns.
        backward: the members that belong to the backward.
        unit: only of fused regions: the scalar that the backward is linear in. The loop runs with
            1 in its place, and the loop's gradients are multiplied by it afterwards.
        prelude: backward nodes between the unit and the region. They run before the loop, with 1
            in place of the unit.
        symbolic: the number of what the loops run over varies from batch to batch, as that of
            tokens may; ``num_tokens`` is then that of the batch that is planned for.
        unbounded: and it may exceed ``num_tokens``.
        axis: what its loops run over, ``"tokens"``, ``"heads"``, ``"queries"`` or ``"features"``.
            ``num_tokens`` is their number, and ``width`` that of elements for each of them.
    """

    kind: str
    source: str
    num_tokens: int
    width: int
    members: tuple[tuple[str, Spec | None], ...]
    outputs: tuple[str, ...]
    backward: frozenset[str]
    fused: bool = False
    unit: str | None = None
    prelude: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    note: str = ""
    symbolic: bool = False
    unbounded: bool = False
    axis: str = TOKENS

    @property
    def name(self) -> str:
        return self.members[0][0]


@dataclasses.dataclass(frozen=True)
class LoopInput:
    """An operand of a loop: sliced along its token dims, or whole."""

    node: str
    spec: Spec  # empty: every chunk reads the whole value


@dataclasses.dataclass(frozen=True)
class LoopOutput:
    """A result of a loop: the rows of all chunks stacked, or their parts combined.

    Attributes:
        spec: None if it is combined.
        scaled: only in a fused loop: it is multiplied by the unit after the loop.
        combine: how parts are combined, ``"sum"``, ``"max"``, ``"min"`` or ``"any"``.
        relative_to: the maximum that a sum is relative to (graph/row_sums.py).
        over: the input whose rows it is written over, if that is any.
    """

    node: str
    spec: Spec | None
    scaled: bool = False
    combine: str = "sum"
    relative_to: str = ""
    over: str = ""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a loop.

    Attributes:
        axis: what they cut, ``"tokens"``, ``"heads"``, ``"queries"`` or ``"features"``.
        total: how many of them there are, in the batch that is planned for.
        length: how many a chunk holds; where ``symbolic``, the most that it holds.
        symbolic: ``total`` varies from batch to batch.
    """

    axis: str
    total: int
    length: int
    count: int
    symbolic: bool = False

    def __post_init__(self) -> None:
        if self.symbolic:
            return
        if not 1 <= self.length <= self.total:
            raise ValueError(f"chunks of {self.length} of {self.total} {self.axis}")
        if not (self.count - 1) * self.length < self.total <= self.count * self.length:
            raise ValueError(f"{self.count} chunks of {self.length} {self.axis} do not cover")


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """One loop over chunks.

    Attributes:
        members: the nodes that it computes, in the graph's order.
        specs: where each of them holds what the chunks cut; None if it is reduced over it.
        chunks: None until their length is chosen.
        unit: the scalar that is 1 inside the loop; None if the loop is not fused.
        prelude: nodes that are computed before the loop, with 1 in place of the unit.
        accumulate: the dtype of sums over chunks: ``FLOAT32``, where that is wider than the
            result's; or ``INPUT``, the result's own.
    """

    phase: str  # "forward" | "backward"
    members: tuple[str, ...]
    specs: tuple[Spec | None, ...]
    inputs: tuple[LoopInput, ...]
    outputs: tuple[LoopOutput, ...]
    unit: str | None = None
    prelude: tuple[str, ...] = ()
    chunks: Chunks | None = None
    accumulate: str = FLOAT32

    @property
    def least_sum_bytes(self) -> int:
        """Bytes of an element of a sum over chunks, if the result's own dtype has no more."""
        return 4 if self.accumulate == FLOAT32 else 1

    @property
    def cut(self) -> Chunks:
        """The chunks, once they are known."""
        assert self.chunks is not None, "the length of the chunks is not chosen yet"
        return self.chunks

    def spec_of(self) -> dict[str, Spec | None]:
        """The spec of each member, and of each input that is cut."""
        sliced = {item.node: item.spec for item in self.inputs if item.spec}
        return {**sliced, **dict(zip(self.members, self.specs, strict=True))}


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """A region, its mode and its loops: one entry of ``Report.regions``.

    Attributes:
        kind: ``"lm_head"``, ``"mlp"`` or ``"segment"``.
        mode: ``"fused"``, ``"mixed"``, ``"recompute"`` or ``"save"``.
        source: the region's place in the user's model: a module path or ``file:line``.
        bytes_before: size of the large matrix products of the region over all tokens.
        bytes_after: size of those of one chunk, and of what is saved of them for backward.
        saved: the members that the forward loop stacks for the backward loop.
        members: all nodes, each with its token dims (None: it is reduced over tokens).
        symbolic: the token count varies from batch to batch. ``num_tokens`` and ``num_chunks`` are
            then those of the batch that is planned for, and ``chunk_tokens`` is the most that a
            chunk holds: the loop divides each batch into chunks of equal length
            (graph/loop_op.py).
        unbounded: and it may exceed ``num_tokens``.
        axis: what the loops run over, ``"tokens"``, ``"heads"``, ``"queries"`` or ``"features"``.
            ``num_tokens`` counts them. A loop may have chunks of its own: sections of features.
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
    unbounded: bool = False
    axis: str = TOKENS

    def chunks_in(self, phase: str) -> Chunks:
        """The chunks of the first loop of a phase; those of the region if it has no such loop."""
        sizes = self.num_tokens, self.chunk_tokens, self.num_chunks
        own = (loop.cut for loop in self.loops if loop.phase == phase)
        return next(own, Chunks(self.axis, *sizes, self.symbolic))


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A value that crosses from forward to backward.

    Attributes:
        node, source: its name in the final forward graph, and the place that computes it.
        value: the joint graph's node; empty for values that the plan adds, such as packed masks.
        on_host: it waits in host memory; ``by_chunk``: loops copy rows from there.
    """

    node: str
    bytes: int
    source: str = ""
    value: str = ""
    on_host: bool = False
    by_chunk: bool = False


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A copy of a saved value to the host, in the forward, or back, in the backward.

    Attributes:
        node: the node of the joint graph whose value it copies.
        to_host: False: back to the device.
        start_us, end_us: when the copy runs, from the beginning of its graph, by the cost model.
        stall_us: how long the device waits for it, as it has nothing else to do.
    """

    node: str
    bytes: int
    to_host: bool
    start_us: float
    end_us: float
    stall_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Reconstructed:
    """A value that is not saved, or saved in fewer bytes, because backward reconstructs it.

    Attributes:
        node: the value.
        sources: the values that it is reconstructed from.
        rule: the names of the rules, in the order in which they are applied.
        grade: ``"exact"`` (the same bits) or ``"tolerant"`` (rounding within ``bounds``).
        bytes: the saved bytes that this avoids, less those that are saved in its place.
        bounds: the error that each tolerant rule may add.
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
    """What crosses from forward to backward.

    Attributes:
        saved: the values that cross, one for each storage.
        solver: the name of the solver that chose them; ``"torch"`` for torch's partitioner.
        nested: values that backward recomputes in a pass of their own (memory/program.py).
        inner, levels: those of them of level 2 or higher; the level of each, in the same order.
        transfers: the copies of what waits in host memory, in the order in which they run.
        forward_us: the time of the forward's ops by the cost model, beside which copies run; 0
            without transfers.
        backward_us: the same of the backward.
    """

    saved: tuple[SavedValue, ...]
    solver: str
    reconstructed: tuple[Reconstructed, ...] = ()
    nested: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    forward_us: float = 0.0
    backward_us: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes that wait on the device between forward and backward."""
        return sum(v.bytes for v in self.saved if not v.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in host memory; ``pinned_bytes`` tells what they take there."""
        return sum(v.bytes for v in self.saved if v.on_host)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory that these take from torch's allocator."""
        return pinned_bytes(v.bytes for v in self.saved if v.on_host)


@dataclasses.dataclass(frozen=True)
class PeakAt:
    """The simulated peak of one plan for a batch of certain sizes.

    Attributes:
        sizes: each symbolic size of the inputs, such as ``ids.size()[1]``, and its value.
        peak_bytes: as of ``Outcome``.
    """

    sizes: tuple[tuple[str, int], ...]
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of the pipeline decided for one joint graph.

    Attributes:
        peak_bytes: simulated peak of forward and backward; None where a size depends on data.
            Symbolic sizes count as in the batch that is planned for.
        baseline_peak_bytes: the same under Inductor alone, which saves what torch chooses.
        extra_time: estimated time beyond that step's, as a fraction of it.
        notes: what else the user should know of this graph.
        scheduled_peak_bytes: peak of the compiled graphs by Inductor's schedule; None until read.
        limit_bytes: the highest simulated peak that it might have; None without a budget in bytes.
        left_to_torch: why torch's partitioner chose what is saved; empty if mstpass did.
        peaks: where sizes are symbolic, the peaks of the plan's largest batch and of shorter ones.
        budget_holds_for: the sizes of the largest batch of the plan whose simulated peak is within
            a budget in bytes; empty without a budget, and where the plan serves one batch.
        draws_random_numbers, collectives: the step reads a random state; waits for ranks in these.
        no_plan: why the compiled graph has none, or none that is known; empty if it has one.
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
    left_to_torch: str = ""
    peaks: tuple[PeakAt, ...] = ()
    budget_holds_for: tuple[tuple[str, int], ...] = ()
    draws_random_numbers: bool = False
    collectives: Collectives | None = None
    no_plan: str = ""
