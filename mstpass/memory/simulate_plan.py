"""The step that a plan makes as one program: the order of its ops, its memory and its time.

schedule/write_program.py writes the same program as the two graphs. The order is that of torch's
partitioner (torch/_functorch/partitioners.py)::

    forward     as traced: the ops that the outputs and the saved values depend on
    backward    as traced: the ops that the gradients depend on; each recomputed value
                just before its first use

Between two checkpoints the backward recomputes the forward's values, and keeps them until their
gradients are done. A *nested* value in between divides that stretch: it is recomputed in a pass of
its own, of which nothing else is kept::

    saved a -> [block 1] -> nested b -> [block 2]

    backward:   b from a, through block 1; nothing else of block 1 is kept
                block 2 from b, its values kept; gradients of block 2
                block 1 from a once more, its values kept; gradients of block 1

These are two levels of recursive checkpointing (Chen et al., arXiv 1604.06174, section 4.3). With
*inner* nested values there are three: on the way to a nested value they are computed like all
others, and they have passes of their own later. Saved values that wait on the host are copied there
and back beside these ops (host_copies.py), and cheap values may be computed once more for their
later readers (repeated_values.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Set

from mstpass.memory.host_copies import (
    HostCopy,
    OpsWithCopies,
    offloaded_name,
    with_offloads,
    with_reloads,
)
from mstpass.memory.repeated_values import (
    CHEAP_KINDS,
    MOST_LOWERED,
    Repeated,
    repeated_values,
)
from mstpass.memory.simulate_ops import GraphOps, held_outputs, simulate_ops
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import INPUT, POINTWISE, REALIZED, SIZE
from mstpass.problem.problem import CutProblem, Plan, Value
from mstpass.problem.saved_set import must_offload


@dataclasses.dataclass(frozen=True)
class Program:
    """A step: the ops of forward and backward, in the order in which they run.

    Attributes:
        offloads: the copies among the forward's ops, of saved values to the host.
        reloads: the copies among the backward's ops, from there.
    """

    forward: tuple[Value, ...]
    backward: tuple[Value, ...]
    offloads: tuple[HostCopy, ...] = ()
    reloads: tuple[HostCopy, ...] = ()


class StepSimulation:
    """The step in which given values are saved. Each of its properties is computed when first read.

    The problem must have no open regions, and ``verify`` must accept the saved set.

    Args:
        saved: names of the values that cross from forward to backward.
        nested: names of the values that backward computes in passes of their own.
        offloaded: names of the saved values that cross by way of the host, besides those that
            must.
        inner: names of the nested values that passes of others compute anew.
    """

    def __init__(
        self,
        problem: CutProblem,
        saved: Set[str],
        nested: Set[str] = frozenset(),
        offloaded: Set[str] = frozenset(),
        inner: Set[str] = frozenset(),
    ):
        self.problem, self.saved = problem, saved
        self.nested, self.inner = frozenset(nested), frozenset(inner & nested)
        self.offloaded = frozenset(offloaded) | (saved & must_offload(problem))

    @classmethod
    def of(cls, problem: CutProblem, plan: Plan) -> StepSimulation:
        """The step of a plan, for a problem in which its modes are chosen."""
        return cls(problem, plan.saved, plan.nested, plan.offloaded, plan.inner)

    @functools.cached_property
    def forward_copies(self) -> OpsWithCopies:
        """The ops of the forward. Apart from ``program``: the backward's takes longer to find."""
        ops, host = _forward_ops(self.problem, self.saved), self.problem.host
        if not self.offloaded or host is None:
            return OpsWithCopies(ops)
        return with_offloads(ops, self.offloaded, host)

    @functools.cached_property
    def backward_copies(self) -> OpsWithCopies:
        """The ops of the backward, its inputs first."""
        host = self.problem.host
        ops = _backward_ops(self.problem, self.saved, _Nested(self.nested, self.inner))
        if not self.offloaded or host is None:
            return OpsWithCopies(ops)
        cheap = {op.name for op in ops if _is_cheap(op)}
        free = {value.name for value in self.problem.values if value.free}
        return with_reloads(ops, self.offloaded, cheap - set(self.problem.gradients), free, host)

    @functools.cached_property
    def program(self) -> Program:
        forward, backward = self.forward_copies, self.backward_copies
        return Program(forward.ops, backward.ops, forward.copies, backward.copies)

    @functools.cached_property
    def forward(self) -> Timeline:
        waits = map(offloaded_name, self.offloaded)
        kept = [*self.problem.outputs, *(self.saved - self.offloaded), *waits]
        return simulate_ops(self.forward_copies.ops, kept)

    @functools.cached_property
    def backward(self) -> Timeline:
        return self.backward_ops.simulated()

    @property
    def backward_ops(self) -> GraphOps:
        ops = self.program.backward
        tangents = [op.name for op in ops if op.kind == INPUT and op.name not in self.saved]
        free = {value.name for value in self.problem.values if value.free}
        outputs = [name for name in self.problem.outputs if name not in free]
        held, kept = held_outputs(self.program.forward, outputs, self.saved, ops)
        on_device = self.saved - self.offloaded
        freed = (*on_device, *(t for t in tangents if t not in free), *(o.name for o in held))
        return GraphOps((*held, *ops), (*self.problem.gradients, *kept), freed)

    @property
    def memory(self) -> StepMemory:
        return StepMemory(self.forward, self.backward)

    @functools.cached_property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @functools.cached_property
    def _lowered(self) -> Repeated:
        """Backward computes some cheap values twice."""
        ops = self.backward_ops
        cheap = {op.name for op in ops.ops if isinstance(op, Value) and _is_cheap(op)}
        return repeated_values(self.memory, ops, cheap)

    @property
    def lowered_peak_bytes(self) -> int:
        """The peak of ``lowered_program``."""
        return self._lowered.memory.peak_bytes

    @property
    def lowered_program(self) -> Program:
        """The program with some cheap values computed twice, where that lowers the peak."""
        held = {op.name for op in self.backward_ops.ops} - {op.name for op in self.program.backward}
        ops = self._lowered.backward.ops
        backward = tuple(op for op in ops if isinstance(op, Value) and op.name not in held)
        return dataclasses.replace(self.program, backward=backward)

    def lowered_within(self, limit_bytes: float) -> bool:
        """Whether the lowered peak is at most the limit; it is computed only if need be."""
        if self.forward.peak.bytes > limit_bytes or self.peak_bytes > MOST_LOWERED * limit_bytes:
            return False
        return self.peak_bytes <= limit_bytes or self.lowered_peak_bytes <= limit_bytes

    def within(self, limit_bytes: float) -> bool:
        """Whether the peak is at most the limit; the backward is simulated only if need be."""
        return self.forward.peak.bytes <= limit_bytes and self.peak_bytes <= limit_bytes

    def bytes_at(self) -> dict[str, int]:
        """The bytes alive while each kernel runs; the higher number if it runs in both graphs."""
        found: dict[str, int] = {}
        for name, size in (*self.forward.moments, *self.backward.moments):
            found[name] = max(size, found.get(name, 0))
        return found

    @functools.cached_property
    def us(self) -> float:
        """Time of forward and backward by the cost model: recomputation, waits for copies."""
        ops_us = sum(value.us for value in (*self.program.forward, *self.program.backward))
        return ops_us + self.forward_copies.stall_us + self.backward_copies.stall_us


def simulate_plan(problem: CutProblem, plan: Plan) -> StepSimulation:
    """The step of a plan, for a problem with regions."""
    return StepSimulation.of(with_modes(problem, plan.modes), plan)


def step_memory(problem: CutProblem, saved: Set[str], nested: Set[str] = frozenset()) -> StepMemory:
    """The memory of a step; arguments as of ``StepSimulation``."""
    return StepSimulation(problem, saved, nested).memory


def step_us(problem: CutProblem, saved: Set[str], nested: Set[str] = frozenset()) -> float:
    """The time of a step in microseconds; arguments as of ``StepSimulation``."""
    return StepSimulation(problem, saved, nested).us


# ---- order ---------------------------------------------------------------------------------------
def _forward_ops(problem: CutProblem, saved: Set[str]) -> tuple[Value, ...]:
    used = _with_ancestors(problem, problem.once(_index), {*problem.outputs, *saved})
    return tuple(value for value in problem.values if value.name in used)


@dataclasses.dataclass(frozen=True)
class _Nested:
    """Names of all nested values, and of the inner ones among them."""

    every: frozenset[str]
    inner: frozenset[str]

    def ends_of(self, name: str) -> frozenset[str]:
        """The nested values that the pass of this one may begin with."""
        return self.every if name in self.inner else self.every - self.inner


def _backward_ops(problem: CutProblem, saved: Set[str], nested: _Nested) -> tuple[Value, ...]:
    index, gradients = problem.once(_index), set(problem.gradients)
    used = set(gradients)
    for op in reversed(problem.backward):
        if op.name in used:
            used.update(op.inputs)
    available = set(saved) | {value.name for value in problem.values if value.free}
    free = problem.once(_free_inputs)
    inputs = [
        free[v.name] if v.free else _as_input(v)
        for v in problem.values
        if v.free or v.name in saved
    ]
    recomputation = _Recomputation(problem, index, available, nested)
    ops: list[Value] = []
    for op in (*problem.backward, *(v for v in problem.values if v.name in gradients)):
        if op.name in used:
            is_forward_value = op.name in index
            names = [op.name] if is_forward_value else op.inputs
            if missing := [name for name in names if recomputation.is_missing(name)]:
                ops += recomputation.of(missing)
            if not is_forward_value:
                ops.append(op)
    return (*inputs, *ops)


def _index(problem: CutProblem) -> dict[str, int]:
    return {value.name: i for i, value in enumerate(problem.values)}


def _is_cheap(value: Value) -> bool:
    return value.kind in CHEAP_KINDS and not (value.heavy or value.pinned)


def _free_inputs(problem: CutProblem) -> dict[str, Value]:
    return {value.name: _as_input(value) for value in problem.values if value.free}


def _as_input(value: Value) -> Value:
    kind = SIZE if value.kind == SIZE else INPUT
    return dataclasses.replace(value, kind=kind, inputs=(), inner_bytes=0, us=0.0)


def _with_ancestors(problem: CutProblem, index: dict[str, int], names: Set[str]) -> set[str]:
    found: set[str] = set()
    stack = [name for name in names if name in index]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack.extend(problem.values[index[name]].inputs)
    return found


class _Recomputation:
    """The forward values that backward computes again, in order.

    Attributes:
        available: names of the values that exist in backward so far; it grows.
    """

    def __init__(
        self, problem: CutProblem, index: dict[str, int], available: set[str], nested: _Nested
    ):
        self.problem, self.index = problem, index
        self.available, self.nested = available, nested

    def is_missing(self, name: str) -> bool:
        return name not in self.available and name in self.index

    def of(self, names: Iterable[str]) -> list[Value]:
        """The missing values that these values are computed from, and they themselves.

        All of them are available from then on.
        """
        nested, missing = self._missing(names, self.nested.every)
        passes = [value for name in nested for value in self._pass(name)]
        self.available.update(value.name for value in missing)
        return [*passes, *missing]

    def _pass(self, name: str) -> list[Value]:
        """A nested value, and copies of what it is computed from, which nothing else reads."""
        if name in self.available:  # another nested value was computed from it
            return []
        value = self.problem.values[self.index[name]]
        nested, missing = self._missing(value.inputs, self.nested.ends_of(name))
        passes = [value for other in nested for value in self._pass(other)]
        alias = {other.name: f"{other.name}:for:{name}" for other in missing}
        self.available.add(name)
        kind = REALIZED if value.kind == POINTWISE else value.kind
        last = dataclasses.replace(value.reading(alias, name), kind=kind)
        return [*passes, *(other.reading(alias, alias[other.name]) for other in missing), last]

    def _missing(self, names: Iterable[str], ends: Set[str]) -> tuple[list[str], list[Value]]:
        """What has to be computed for these values: names of ``ends``, and all other values.

        Both are in topological order. The search ends at the nested values that ``ends`` names.
        """
        found: set[int] = set()
        nested: set[int] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            i = self.index.get(name)
            if i is None or name in self.available or i in found:
                continue
            if name in ends:
                nested.add(i)
            else:
                found.add(i)
                stack.extend(self.problem.values[i].inputs)
        values = self.problem.values
        return [values[i].name for i in sorted(nested)], [values[i] for i in sorted(found)]
