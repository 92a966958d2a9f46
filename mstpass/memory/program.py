"""The step that a plan makes as one program: its ops in the order in which they run.

memory/simulate_plan.py simulates the program, and schedule/write_program.py writes it as the two
graphs. The order is that of torch's
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

These are two levels of recursive checkpointing (Chen et al., arXiv 1604.06174, section 4.3).
Nested values have *levels*: on the way to one of level l, those of higher levels are computed like
all others, and they have passes of their own later. Saved values that wait on the host are copied
there and back beside these ops (host_copies.py), and cheap values may be computed once more for
their later readers (repeated_values.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set

from mstpass.memory.host_copies import HostCopy
from mstpass.memory.repeated_values import CHEAP_KINDS
from mstpass.problem.op import INPUT, POINTWISE, REALIZED, SIZE
from mstpass.problem.problem import CutProblem, Value
from mstpass.walk import needed_first, walk_once


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


def forward_ops(problem: CutProblem, saved: Set[str]) -> tuple[Value, ...]:
    """The ops that the outputs and the saved values depend on, as traced."""
    index = problem.cached(_index)
    names = (name for name in {*problem.outputs, *saved} if name in index)
    used = set(walk_once(names, lambda name: problem.values[index[name]].inputs))
    return tuple(value for value in problem.values if value.name in used)


def backward_ops(
    problem: CutProblem, saved: Set[str], nested: Mapping[str, int]
) -> tuple[Value, ...]:
    """The inputs of the backward, and the ops that the gradients depend on, as traced, each
    recomputed value just before its first use.

    Args:
        nested: the values that have passes of their own, with their levels.
    """
    index, gradients = problem.cached(_index), set(problem.gradients)
    used = set(gradients)
    for op in reversed(problem.backward):
        if op.name in used:
            used.update(op.inputs)
    available = set(saved) | {value.name for value in problem.values if value.free}
    free = problem.cached(_free_inputs)
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


def is_cheap(value: Value) -> bool:
    """Whether backward may compute the value once more for its later readers."""
    return value.kind in CHEAP_KINDS and not (value.heavy or value.pinned)


def _free_inputs(problem: CutProblem) -> dict[str, Value]:
    return {value.name: _as_input(value) for value in problem.values if value.free}


def _as_input(value: Value) -> Value:
    kind = SIZE if value.kind == SIZE else INPUT
    return value.changed(kind=kind, inputs=(), inner_bytes=0, us=0.0)


class _Recomputation:
    """The forward values that backward computes again, in order.

    Attributes:
        available: names of the values that exist in backward so far; it grows.
    """

    def __init__(
        self,
        problem: CutProblem,
        index: dict[str, int],
        available: set[str],
        nested: Mapping[str, int],
    ):
        self.problem, self.index = problem, index
        self.available, self.nested = available, nested
        levels = set(nested.values())
        self.up_to = {level: {n for n in nested if nested[n] <= level} for level in levels}

    def is_missing(self, name: str) -> bool:
        return name not in self.available and name in self.index

    def of(self, names: Iterable[str]) -> list[Value]:
        """The missing values that these values are computed from, and they themselves.

        All of them are available from then on.
        """
        nested, missing = self._missing(names, self.nested.keys())
        passes = [value for name in nested for value in self._pass(name)]
        self.available.update(value.name for value in missing)
        return [*passes, *missing]

    def _pass(self, name: str) -> list[Value]:
        """A nested value, and copies of what it is computed from, which nothing else reads."""
        passes: list[Value] = []
        for one in needed_first(name, lambda other: self._before(other)[0], self.available):
            value, (_, missing) = self.problem.values[self.index[one]], self._before(one)
            alias = {other.name: f"{other.name}:for:{one}" for other in missing}
            self.available.add(one)
            kind = REALIZED if value.kind == POINTWISE else value.kind
            passes += (other.reading(alias, alias[other.name]) for other in missing)
            passes.append(dataclasses.replace(value.reading(alias, one), kind=kind))
        return passes

    def _before(self, name: str) -> tuple[list[str], list[Value]]:
        """What has to be computed for a nested value: other nested ones, and all other values."""
        inputs = self.problem.values[self.index[name]].inputs
        return self._missing(inputs, self.up_to[self.nested[name]])

    def _missing(self, names: Iterable[str], ends: Set[str]) -> tuple[list[str], list[Value]]:
        """What has to be computed for these values: names of ``ends``, and all other values.

        Both are in topological order. The search ends at the nested values that ``ends`` names.
        """
        values = self.problem.values
        missing = lambda names: (self.index[name] for name in names if self.is_missing(name))
        further = lambda i: () if values[i].name in ends else missing(values[i].inputs)
        found = [values[i] for i in sorted(walk_once(missing(names), further))]
        nested = [value.name for value in found if value.name in ends]
        return nested, [value for value in found if value.name not in ends]
