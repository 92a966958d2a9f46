"""What a plan's step looks like: the order of forward and backward, and the memory of both.

The order is that of torch's partitioner (torch/_functorch/partitioners.py): the forward as traced;
the backward as traced, each recomputed value just before its first use there, behind the passes of
the nested values that it comes from (nested.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Set

from mstpass.memory.simulate_ops import held_outputs, simulate_ops
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import CALL, INPUT, POINTWISE
from mstpass.problem.problem import CutProblem, Plan, Value


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ops of a step's two graphs, in the order in which they run."""

    forward: tuple[Value, ...]
    backward: tuple[Value, ...]


def _forward(problem: CutProblem, saved: Set[str]) -> tuple[Value, ...]:
    used = _ancestors(problem, problem.once(_index), {*problem.outputs, *saved})
    return tuple(v for v in problem.values if v.name in used)


def _backward(problem: CutProblem, saved: Set[str], nested: Set[str]) -> tuple[Value, ...]:
    index, gradients = problem.once(_index), set(problem.gradients)
    used = set(gradients)
    for op in reversed(problem.backward):
        if op.name in used:
            used.update(op.inputs)
    there = set(saved) | {value.name for value in problem.values if value.free}
    crossing = [_as_input(v) for v in problem.values if v.name in saved or v.free]
    again = _Again(problem, index, there, nested)
    backward: list[Value] = []
    for op in (*problem.backward, *(v for v in problem.values if v.name in gradients)):
        if op.name in used:
            own = op.name in index
            if missing := [n for n in ([op.name] if own else op.inputs) if again.misses(n)]:
                backward += again.values(missing)
            backward += [] if own else [op]
    return (*crossing, *backward)


def _index(problem: CutProblem) -> dict[str, int]:
    return {value.name: i for i, value in enumerate(problem.values)}


class _Again:
    """What backward recomputes, in order; ``there`` is what it has, and grows."""

    def __init__(
        self, problem: CutProblem, index: dict[str, int], there: set[str], nested: Set[str]
    ):
        self.problem, self.index, self.there, self.nested = problem, index, there, nested

    def misses(self, name: str) -> bool:
        return name not in self.there and name in self.index

    def values(self, names: Iterable[str]) -> list[Value]:
        """What is missing of the names and of all they come from, for good."""
        ahead, missing = self._missing(names)
        passes = [value for name in ahead for value in self._pass(name)]
        self.there.update(value.name for value in missing)
        return [*passes, *missing]

    def _pass(self, name: str) -> list[Value]:
        """A nested value, with what it comes from under names that nothing else reads."""
        if name in self.there:  # another one's pass went by it
            return []
        value = self.problem.values[self.index[name]]
        ahead, missing = self._missing(value.inputs)
        passes = [value for other in ahead for value in self._pass(other)]
        alias = {other.name: f"{other.name}:for:{name}" for other in missing}
        self.there.add(name)
        kind = CALL if value.kind == POINTWISE else value.kind  # it is written to memory
        last = dataclasses.replace(value, kind=kind, inputs=_inputs(value, alias))
        return [*passes, *(_renamed(other, alias) for other in missing), last]

    def _missing(self, names: Iterable[str]) -> tuple[list[str], list[Value]]:
        """Nested values, and all others, that are not there, each in topological order."""
        found: set[int] = set()
        ahead: set[int] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            i = self.index.get(name)
            if i is None or name in self.there or i in found:
                continue
            if name in self.nested:
                ahead.add(i)
            else:
                found.add(i)
                stack.extend(self.problem.values[i].inputs)
        values = self.problem.values
        return [values[i].name for i in sorted(ahead)], [values[i] for i in sorted(found)]


def _renamed(value: Value, alias: dict[str, str]) -> Value:
    return dataclasses.replace(value, name=alias[value.name], inputs=_inputs(value, alias))


def _inputs(value: Value, alias: dict[str, str]) -> tuple[str, ...]:
    return tuple([alias.get(name, name) for name in value.inputs])


class StepSimulation:
    """A step in which these values cross from forward to backward; its parts as they are asked for.

    For a problem without open regions and a saved set that ``verify`` accepts.
    """

    def __init__(self, problem: CutProblem, saved: Set[str], nested: Set[str] = frozenset()):
        self.problem, self.saved, self.nested = problem, saved, frozenset(nested)

    @functools.cached_property
    def _ops(self) -> tuple[Value, ...]:
        """The forward's, without the backward's schedule, which takes longer."""
        return _forward(self.problem, self.saved)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return Schedule(self._ops, _backward(self.problem, self.saved, self.nested))

    @functools.cached_property
    def forward(self) -> Timeline:
        return simulate_ops(self._ops, [*self.problem.outputs, *self.saved])

    @functools.cached_property
    def backward(self) -> Timeline:
        ops = self.schedule.backward
        tangents = [op.name for op in ops if op.kind == INPUT and op.name not in self.saved]
        free = {value.name for value in self.problem.values if value.free}
        outputs = [name for name in self.problem.outputs if name not in free]
        held, kept = held_outputs(self.schedule.forward, outputs, self.saved, ops)
        freed = [*self.saved, *(t for t in tangents if t not in free), *(o.name for o in held)]
        return simulate_ops([*held, *ops], [*self.problem.gradients, *kept], freed)

    @property
    def memory(self) -> StepMemory:
        return StepMemory(self.forward, self.backward)

    @functools.cached_property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def within(self, limit_bytes: float) -> bool:
        """Whether the peak is no higher. The backward is left out where the forward alone is."""
        return self.forward.peak.bytes <= limit_bytes and self.peak_bytes <= limit_bytes

    def bytes_at(self) -> dict[str, int]:
        """What is alive while each kernel runs; the most where one runs in both graphs."""
        found: dict[str, int] = {}
        for name, size in (*self.forward.moments, *self.backward.moments):
            found[name] = max(size, found.get(name, 0))
        return found

    @functools.cached_property
    def us(self) -> float:
        """Time by the cost model, what backward computes again included."""
        return sum(value.us for value in (*self.schedule.forward, *self.schedule.backward))


def simulate_plan(problem: CutProblem, plan: Plan) -> StepSimulation:
    """The step of a plan for a problem with regions."""
    return StepSimulation(with_modes(problem, plan.modes), plan.saved, plan.nested)


def step_memory(problem: CutProblem, saved: Set[str], nested: Set[str] = frozenset()) -> StepMemory:
    """The memory of a step in which these values cross from forward to backward."""
    return StepSimulation(problem, saved, nested).memory


def step_us(problem: CutProblem, saved: Set[str], nested: Set[str] = frozenset()) -> float:
    """Time of a step by the cost model, what backward computes again included."""
    return StepSimulation(problem, saved, nested).us


def _as_input(value: Value) -> Value:
    return dataclasses.replace(value, kind=INPUT, inputs=(), inner_bytes=0, us=0.0)


def _ancestors(problem: CutProblem, index: dict[str, int], names: Set[str]) -> set[str]:
    found: set[str] = set()
    stack = [name for name in names if name in index]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack.extend(problem.values[index[name]].inputs)
    return found
