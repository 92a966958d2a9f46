"""The partition problem and its answer as plain data: ``CutProblem`` and ``Plan``.

The problem asks which values cross from forward to backward. A value is *available* in backward if
it is free (an input of the step), if it is saved, or if it may be recomputed and all its inputs are
available. A plan picks

- a mode for each region, which decides the region's loops (apply_modes.py), and
- the saved set, of values of the problem with these loops in place.

A plan's peak memory is simulated (memory/simulate_plan.py). The extra time of a plan is the time of
what backward recomputes. Solvers read nothing but this data, so that they need neither PyTorch nor
a graph.

``Host`` is memory in which saved values wait between forward and backward. A saved value may be
*offloaded*: forward copies it to pinned memory of the host and frees it on the device, and backward
copies it back (*reloads* it) in time for its first use. All copies of a graph run one after the
other on a stream of their own, beside the device's computation.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from mstpass.problem import problem_json
from mstpass.problem.names import unfinished
from mstpass.problem.op import POINTWISE, Op


@dataclasses.dataclass(frozen=True)
class Host:
    """The host memory that a step may use, and the way to it.

    Attributes:
        budget_bytes: pinned memory that a plan may take of its own accord. What checkpoint policies
            offload does not count against it.
        offload_bytes_per_us: speed of copies from the device to the host.
        reload_bytes_per_us: speed of copies from the host to the device.
    """

    budget_bytes: int
    offload_bytes_per_us: float
    reload_bytes_per_us: float

    def __post_init__(self) -> None:
        if self.budget_bytes < 0:
            raise ValueError(f"budget_bytes={self.budget_bytes} must not be negative")
        for name in ("offload_bytes_per_us", "reload_bytes_per_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What values of these sizes, in bytes, take of pinned memory.

    torch's allocator for it rounds each block up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h).
    """
    return sum(1 << (size - 1).bit_length() for size in sizes if size > 0)


MUST_SAVE, MUST_RECOMPUTE = "must_save", "must_recompute"
PREFER_RECOMPUTE = "prefer_recompute"
MAY_OFFLOAD, MUST_OFFLOAD = "may", "must"
RECOMPUTED = (MUST_RECOMPUTE, PREFER_RECOMPUTE)
FUSED, MIXED, RECOMPUTE, SAVE = "fused", "mixed", "recompute", "save"  # kinds of modes
WHOLE = "whole"  # the kind of the mode without loops
FREE_OVERHEAD = 0.02  # the default of the option ``free_overhead``

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Value(Op):
    """One forward value, or one op of the backward.

    Attributes:
        us: the time to compute it, in microseconds, by the cost model.
        free: available in backward at no cost, as an input of the step is.
        heavy: slow to recompute (a matmul, attention, the result of a checkpointed region).
        pinned: must not be recomputed (a loop that computes gradients, a random draw).
        savable: may be saved. A view may not: its base is saved instead, so that no storage
            crosses twice.
        needed: an op of the backward reads it.
        forward: an output of the forward is computed from it. Other forward values only serve the
            backward.
        tag: the user's checkpoint policy that binds the value (graph/recompute_rules.py), or
            "". A value with ``MUST_SAVE`` is pinned. A value with ``MUST_RECOMPUTE`` or
            ``PREFER_RECOMPUTE`` is not savable, and backward may recompute it even if it is heavy.
        offload: whether the value may cross by way of the host: ``""`` (no), ``MAY_OFFLOAD``, or
            ``MUST_OFFLOAD``, by a checkpoint policy, if it is saved.
    """

    us: float = 0.0
    free: bool = False
    heavy: bool = False
    pinned: bool = False
    savable: bool = True
    needed: bool = False
    forward: bool = True
    tag: str = ""
    offload: str = ""

    def __post_init__(self) -> None:
        if self.offload not in ("", MAY_OFFLOAD, MUST_OFFLOAD):
            raise ValueError(f"{self.name}: offload={self.offload!r} is unknown")
        if self.tag not in ("", MUST_SAVE, *RECOMPUTED):
            raise ValueError(f"{self.name} has the unknown tag {self.tag!r}")
        if self.tag == MUST_SAVE and not self.pinned:
            raise ValueError(f"{self.name} has the tag {self.tag}, so it must be pinned")
        if self.tag in RECOMPUTED and (self.savable or self.pinned):
            raise ValueError(
                f"{self.name} has the tag {self.tag}, so it must be neither savable nor pinned"
            )


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """A buffer that a loop returns, in the place of a node.

    Attributes:
        bytes: size of the loop's own buffer, whose dtype may be wider than the node's.
        scale: the node that the buffer is multiplied by after the loop; empty for none.
        cast: the loop sums in a wider dtype, and the buffer is cast to the node's after the loop.
        over: the node whose buffer the loop reads last and writes it into; empty for one of its
            own, which alone has ``bytes``.
    """

    node: str
    bytes: int
    scale: str = ""
    cast: bool = False
    over: str = ""

    @property
    def name(self) -> str:
        """The name of the buffer: the node's own, unless it is scaled or cast after the loop."""
        return unfinished(self.node) if self.scale or self.cast else self.node

    def finished(self, node: Value) -> Value:
        """The node as a pointwise op that scales or casts the buffer after the loop."""
        inputs = (self.name, *([self.scale] if self.scale else []))
        return dataclasses.replace(node, inputs=inputs, kind=POINTWISE, heavy=False, us=0.0)


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop over chunks of tokens, in the place of the nodes that it computes.

    Attributes:
        members: the nodes that the loop computes chunk by chunk.
        needs: the nodes that the loop reads, whole or in slices.
        prelude: the unit of a fused loop, which is 1 there, and nodes that are computed from it
            before the loop (``at_one``). Empty where the loop needs none of these.
        results: the buffers that the loop returns.
        inner_bytes: memory that one chunk needs besides the results.
        us: time of all chunks, in microseconds.
        narrow: what is wrong with calls in it whose kernels are not made for tensors so large
            (graph/narrow_offsets.py).
        in_rows: as of ``Op``.
    """

    name: str
    members: tuple[str, ...]
    needs: tuple[str, ...]
    results: tuple[LoopResult, ...]
    inner_bytes: int
    us: float
    narrow: tuple[str, ...] = ()
    in_rows: tuple[tuple[str, int], ...] = ()
    prelude: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run a region. A mode without loops leaves the region as it was traced.

    Attributes:
        kind: ``FUSED``, ``MIXED``, ``RECOMPUTE`` or ``SAVE`` (loops/region_loops.py), or ``WHOLE``.
        wide: its loops also compute attention, which others leave whole.
        chunks: how its chunks differ from those of other modes of the kind, in words.
    """

    kind: str
    loops: tuple[Loop, ...] = ()
    wide: bool = False
    chunks: str = ""

    @functools.cached_property
    def name(self) -> str:
        """What tells it from the region's other modes, in plans and reports."""
        words = self.kind, self.chunks, "block" if self.wide else ""
        return ", ".join(filter(None, words))


@dataclasses.dataclass(frozen=True)
class RegionModes:
    """The modes that a region can run in; a plan that names none takes the first."""

    region: str
    modes: tuple[Mode, ...]

    def __post_init__(self) -> None:
        names = [mode.name for mode in self.modes]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"region {self.region} needs one or more modes of different names, has {names}"
            )

    def __getitem__(self, name: str) -> Mode:
        for mode in self.modes:
            if mode.name == name:
                return mode
        known = ", ".join(mode.name for mode in self.modes)
        raise KeyError(f"region {self.region} has no mode {name!r}, only {known}")


@dataclasses.dataclass(frozen=True)
class Alone:
    """Time and simulated peak of the step under Inductor alone, which all plans are held to."""

    us: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class CutProblem:
    """The partition problem of one step. Values and backward are each in topological order.

    Attributes:
        values: the values that need no tangent: all of the forward, and what only backward reads.
        backward: the ops that need a tangent, and the tangents themselves.
        outputs: names of the values that the forward returns, and of its writes to inputs.
        gradients: names of the values that the backward returns.
        regions: the regions whose mode is still open; empty once ``with_modes`` has chosen them.
        recompute_heavy: whether backward may recompute heavy values: less memory for more time.
        host: the host memory that saved values may use; None where there is none, as on a CPU.
        torch_saved: names of the values that torch's own partitioner saves of the step without
            loops, or of those that are left where loops are in place; None where it is not known.
        alone: what Inductor alone makes of the step as it was traced, before any rewrite; None
            where the problem itself is that step, with ``torch_saved``.
        free_overhead: the extra time of the free plan over that, at most: a fraction.
    """

    values: tuple[Value, ...]
    recompute_heavy: bool = False
    backward: tuple[Value, ...] = ()
    outputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    regions: tuple[RegionModes, ...] = ()
    host: Host | None = None
    torch_saved: tuple[str, ...] | None = None
    alone: Alone | None = None
    free_overhead: float = FREE_OVERHEAD

    def keeps(self, value: Value) -> bool:
        """Whether backward must not recompute the value."""
        if value.tag in RECOMPUTED:
            return False
        return value.pinned or (value.heavy and not self.recompute_heavy)

    def allowing(self, recompute_heavy: bool) -> CutProblem:
        """The same problem with another ``recompute_heavy``."""
        if recompute_heavy == self.recompute_heavy:
            return self
        return dataclasses.replace(self, recompute_heavy=recompute_heavy)

    def cached(self, analysis: Callable[[CutProblem], T]) -> T:
        """``analysis(self)``, computed at the first call and kept: a problem never changes."""
        if analysis not in self._known:
            self._known[analysis] = analysis(self)
        found: T = self._known[analysis]
        return found

    @functools.cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the problem as JSON; compressed if the path ends in ``.gz``."""
        problem_json.to_json(self, path)

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> CutProblem:
        """Read a file that ``to_json`` wrote.

        Raises:
            problem_json.ProblemFileError: the file holds no problem, or one of another version.
        """
        return problem_json.from_json(CutProblem, path)

    def __post_init__(self) -> None:
        known: set[str] = set()
        for value in (*self.values, *self.backward):
            if not known.issuperset(value.inputs):
                missing = [name for name in value.inputs if name not in known]
                raise ValueError(f"{value.name} needs {missing}, which do not come before it")
            if value.name in known:
                raise ValueError(f"{value.name} occurs twice")
            known.add(value.name)
        named = (*self.outputs, *self.gradients, *(self.torch_saved or ()))
        unknown = [name for name in named if name not in known]
        if unknown:
            raise ValueError(f"these names are not among the values: {unknown}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A solver's answer.

    Attributes:
        saved: names of the values that cross from forward to backward.
        modes: the name of a mode by region; a region that is not named runs in its first mode.
        nested: values that backward recomputes ahead of time, for nested checkpoints, each with its
            level, 1 or higher. The values on the way to a nested value are dropped after it is
            computed, those of higher levels among them; backward recomputes them once more where
            it uses them.
        offloaded: names of the saved values that cross by way of the host.
        by_chunk: names of those that stay there: loops of the backward copy the rows of a chunk,
            where they can, instead of reading a copy of the whole value.
    """

    saved: frozenset[str]
    modes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nested: Mapping[str, int] = dataclasses.field(default_factory=dict)
    offloaded: frozenset[str] = frozenset()
    by_chunk: frozenset[str] = frozenset()


def with_needs(
    values: Iterable[Value], backward: Iterable[Value], gradients: Iterable[str]
) -> tuple[Value, ...]:
    """The forward values, each marked as needed if an op that leads to a gradient reads it."""
    live = set(gradients)
    for op in reversed(list(backward)):
        if op.name in live:
            live.update(op.inputs)
    return tuple([value.changed(needed=value.name in live) for value in values])
