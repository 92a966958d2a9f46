"""Choose a mode for each region: turn a problem with open regions into one with loops in place.

The loops of the chosen modes replace their members. A member disappears unless a value outside the
loop reads it too; each result of a loop keeps the name of the node that it stands for. The values
keep their order, and a loop comes just before the first value that reads one of its results, where
loops/apply_plans.py writes it into the graph.

The joint graph (loops/apply_plans.py) is written anew by the same walk along its old order
(``needed_first``), so that a loop has the same place in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mstpass.problem.names import at_one
from mstpass.problem.op import CALL, CONSTANT, ITEM, VIEW
from mstpass.problem.problem import (
    MUST_RECOMPUTE,
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    Loop,
    LoopResult,
    Mode,
    Value,
    with_needs,
)
from mstpass.walk import CircleError, needed_first, walk_once

_CACHED = 8  # choices of modes whose problems are kept: solvers ask for the same ones repeatedly


class Cycle(Exception):
    """Loops that need each other's results; ``loop`` names one of them."""

    def __init__(self, loop: str):
        super().__init__(f"{loop} needs its own results: choose another mode for its region")
        self.loop = loop


def with_modes(problem: CutProblem, modes: Mapping[str, str]) -> CutProblem:
    """The problem in which each region runs in a given mode.

    Args:
        modes: the name of a mode by region; a region that is not named runs in its first mode.

    Raises:
        Cycle: loops need each other's results, so that no order of them exists.
        KeyError: a region has no mode of that name.
    """
    chosen = modes_of(problem, modes)
    cache = problem.cached(_by_modes)
    names = tuple(mode.name for mode in chosen)
    if names not in cache:
        loops = [loop for mode in chosen for loop in mode.loops]
        closed = (
            _Writer(problem, loops).write() if loops else dataclasses.replace(problem, regions=())
        )
        if len(cache) == _CACHED:
            del cache[next(iter(cache))]
        cache[names] = closed
    return cache[names]


def modes_of(problem: CutProblem, modes: Mapping[str, str]) -> list[Mode]:
    """The mode of each region, as in ``with_modes``."""
    return [
        region[modes[region.region]] if region.region in modes else region.modes[0]
        for region in problem.regions
    ]


def _by_modes(problem: CutProblem) -> dict[tuple[str, ...], CutProblem]:
    """The last few results of ``with_modes`` for one problem, by the names of the modes."""
    return {}


def loop_values(loop: Loop, nodes: Mapping[str, Value]) -> list[Value]:
    """A loop as a value, and after it one item for each of its results.

    Backward may run the loop again, unless the loop computes gradients or a checkpoint policy saves
    one of its results: then the loop is pinned. If checkpoint policies recompute all of its
    results, none of them is savable.

    Args:
        nodes: the values that the results stand for, by name.
    """
    tags = [_tag(result.node, nodes) for result in loop.results]
    recompute = all(tag in RECOMPUTED for tag in tags)
    pinned = MUST_SAVE in tags or any(result.scale for result in loop.results)
    whole = Value(
        loop.name,
        0,
        tuple(at_one(name) if name in loop.prelude else name for name in loop.needs),
        CALL,
        loop.inner_bytes,
        us=loop.us,
        heavy=True,
        pinned=pinned,
        savable=False,
        tag=tags[0] if recompute else "",
        in_rows=loop.in_rows,
    )
    items = (
        Value(
            result.name,
            result.bytes,
            (result.over, loop.name) if result.over else (loop.name,),
            VIEW if result.over else ITEM,
            savable=not (recompute or result.over),
            tag=tag if recompute else "",
            offload=nodes[result.node].offload if result.name == result.node else "",
        )
        for result, tag in zip(loop.results, tags, strict=True)
    )
    return [whole, *items]


def prelude_values(loop: Loop, nodes: Mapping[str, Value]) -> Iterator[Value]:
    """What is computed before a loop, with 1 in the place of its unit."""
    new = {name: at_one(name) for name in loop.prelude}
    for name in loop.prelude:
        value = nodes[name].renamed(lambda other: new.get(other, other), name=new[name])
        yield value if value.inputs else value.changed(kind=CONSTANT)


def broken_policies(problem: CutProblem) -> dict[str, str]:
    """By region, a node that must be recomputed although one of the region's loops returns it.

    A loop is recomputed as a whole or not at all. If only some of its results must be recomputed,
    its mode cannot obey the policy.
    """
    nodes = {v.name: v for v in (*problem.values, *problem.backward)}
    return {
        region.region: result.node
        for region in problem.regions
        for mode in region.modes
        for loop in mode.loops
        if not loop_values(loop, nodes)[0].tag
        for result in loop.results
        if _tag(result.node, nodes) == MUST_RECOMPUTE
    }


def _tag(name: str, nodes: Mapping[str, Value]) -> str:
    """The checkpoint policy of a value; that of its base where the value is a view."""
    value = nodes[name]
    while value.kind in (VIEW, ITEM) and not (value.savable or value.tag):
        value = nodes[value.inputs[0]]
    return value.tag


class _Writer:
    """Writes the values of a problem in a new order, with loops in the place of their members."""

    def __init__(self, problem: CutProblem, loops: list[Loop]):
        self.problem = problem
        self.old = {v.name: v for v in (*problem.values, *problem.backward)}
        self.tangents = {v.name for v in problem.backward if not v.inputs}
        self.producer: dict[str, tuple[Loop, LoopResult]] = {}
        for loop in loops:
            # of what several loops compute, such as statistics of shared rows, the first returns it
            own = tuple(r for r in loop.results if r.node not in self.producer)
            loop = dataclasses.replace(loop, results=own)
            self.producer.update((result.node, (loop, result)) for result in own)
        self.new: dict[str, Value] = {}
        self.backward: set[str] = set()

    def write(self) -> CutProblem:
        live = set(walk_once([*self.problem.outputs, *self.problem.gradients], self._inputs))
        live.update(name for name, value in self.old.items() if not value.inputs)
        targets = (name for name in self.old if name in live)
        try:
            for target in targets:
                for name in needed_first(target, self._inputs, self.new):
                    self._write(name)
        except CircleError as circle:
            loops = [self.producer[n][0].name for n in circle.path if n in self.producer]
            raise Cycle(loops[-1]) from None
        inputs = lambda name: self.new[name].inputs
        serves_forward = set(walk_once(self.problem.outputs, inputs))
        values = [
            v.changed(forward=v.name in serves_forward)
            for v in self.new.values()
            if v.name not in self.backward
        ]
        backward = tuple(v for v in self.new.values() if v.name in self.backward)
        torch_saved = self.problem.torch_saved
        if torch_saved is not None:
            torch_saved = tuple(name for name in torch_saved if name in self.new)
        return dataclasses.replace(
            self.problem,
            values=with_needs(values, backward, self.problem.gradients),
            backward=backward,
            regions=(),
            torch_saved=torch_saved,
        )

    def _inputs(self, name: str) -> tuple[str, ...]:
        """What a node needs in the new problem."""
        if name in self.producer:
            loop, result = self.producer[name]
            read = (*loop.needs, *(n for one in loop.prelude for n in self.old[one].inputs))
            needs = tuple(other for other in read if other not in loop.prelude)
            return (*needs, result.scale) if result.scale else needs
        return self.old[name].inputs

    def _write(self, name: str) -> None:
        if name not in self.producer:
            self._add(self.old[name])
            return
        loop, result = self.producer[name]
        if loop.name not in self.new:
            for value in (*prelude_values(loop, self.old), *loop_values(loop, self.old)):
                self._add(value)
        if result.name != name:
            self._add(result.finished(self.old[name]))

    def _add(self, value: Value) -> None:
        self.new[value.name] = value
        if value.name in self.tangents or not self.backward.isdisjoint(value.inputs):
            self.backward.add(value.name)
