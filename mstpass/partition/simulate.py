"""What a plan's step looks like: the order of forward and backward, and the memory of both.

The order is that of torch's partitioner (torch/_functorch/partitioners.py): the forward as traced;
the backward as traced, each recomputed value just before its first use there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set

from mstpass.graph.memory import INPUT, StepMemory, Timeline, held_outputs, simulate
from mstpass.partition.problem import CutProblem, Value


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The ops of a step's two graphs, in the order in which they run."""

    forward: tuple[Value, ...]
    backward: tuple[Value, ...]


def schedule(problem: CutProblem, saved: Set[str]) -> Schedule:
    """The two graphs of a problem without open regions, for a saved set that ``verify`` accepts."""
    index = {value.name: i for i, value in enumerate(problem.values)}
    forward = _ancestors(problem, index, {*problem.outputs, *saved})
    gradients = set(problem.gradients)
    used = set(gradients)
    for op in reversed(problem.backward):
        if op.name in used:
            used.update(op.inputs)
    there = set(saved) | {value.name for value in problem.values if value.free}
    crossing = [_as_input(v) for v in problem.values if v.name in saved or v.free]
    backward: list[Value] = []
    for op in (*problem.backward, *(v for v in problem.values if v.name in gradients)):
        if op.name not in used:
            continue
        missing: set[int] = set()
        stack = [op.name] if op.name in index else list(op.inputs)
        while stack:
            name = stack.pop()
            i = index.get(name)
            if i is not None and name not in there and i not in missing:
                missing.add(i)
                stack.extend(problem.values[i].inputs)
        again = [problem.values[i] for i in sorted(missing)]
        there.update(value.name for value in again)
        backward += [*again, op] if op.name not in index else again
    return Schedule(
        tuple(v for v in problem.values if v.name in forward),
        (*crossing, *backward),
    )


class Simulation:
    """A step in which these values cross from forward to backward; its parts as they are asked for.

    For a problem without open regions and a saved set that ``verify`` accepts.
    """

    def __init__(self, problem: CutProblem, saved: Set[str]):
        self.problem, self.saved = problem, saved

    @functools.cached_property
    def schedule(self) -> Schedule:
        return schedule(self.problem, self.saved)

    @functools.cached_property
    def forward(self) -> Timeline:
        return simulate(self.schedule.forward, [*self.problem.outputs, *self.saved])

    @functools.cached_property
    def backward(self) -> Timeline:
        ops = self.schedule.backward
        tangents = [op.name for op in ops if op.kind == INPUT and op.name not in self.saved]
        free = {value.name for value in self.problem.values if value.free}
        outputs = [name for name in self.problem.outputs if name not in free]
        held, kept = held_outputs(self.schedule.forward, outputs, self.saved, ops)
        freed = [*self.saved, *(t for t in tangents if t not in free), *(o.name for o in held)]
        return simulate([*held, *ops], [*self.problem.gradients, *kept], freed)

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


def step_memory(problem: CutProblem, saved: Set[str]) -> StepMemory:
    """The memory of a step in which these values cross from forward to backward."""
    return Simulation(problem, saved).memory


def step_us(problem: CutProblem, saved: Set[str]) -> float:
    """Time of a step by the cost model, what backward computes again included."""
    return Simulation(problem, saved).us


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
