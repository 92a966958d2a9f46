"""Put a region's loops in the place of its members: from a problem with choices to one without.

The members of a loop vanish, but for those that something else reads as well; its results keep the
names of the nodes they stand for. The order stays, each loop just before its first result is read
(as loops/apply_plans.py writes it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mstpass.problem.op import CALL, ITEM, VIEW
from mstpass.problem.problem import (
    MUST_RECOMPUTE,
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    Loop,
    Result,
    Value,
    with_needs,
)

_MOST_KNOWN = 8


class Cycle(Exception):
    """Loops that need each other's results; ``loop`` names one of them."""

    def __init__(self, loop: str):
        super().__init__(f"{loop} needs its own results")
        self.loop = loop


def with_modes(problem: CutProblem, modes: Mapping[str, str]) -> CutProblem:
    """The problem in which each region runs in a mode, its first one where none is given.

    Raises:
        Cycle: the loops cannot be put in an order.
    """
    chosen = tuple(
        region[modes[region.region]] if region.region in modes else region.modes[0]
        for region in problem.regions
    )
    known = problem.once(_Closed).known
    names = tuple(mode.name for mode in chosen)
    if names not in known:
        loops = [loop for mode in chosen for loop in mode.loops]
        closed = _Writer(problem, loops).write() if loops else _without_regions(problem)
        if len(known) == _MOST_KNOWN:
            del known[next(iter(known))]
        known[names] = closed
    return known[names]


class _Closed:
    """What a problem became last, by names of modes: several ask for the same."""

    def __init__(self, problem: CutProblem):
        self.known: dict[tuple[str, ...], CutProblem] = {}


def _without_regions(problem: CutProblem) -> CutProblem:
    return dataclasses.replace(problem, regions=())


def loop_values(loop: Loop, old: Mapping[str, Value]) -> list[Value]:
    """A loop, and the items that it returns.

    Backward may run it once more, unless it computes gradients already or a policy saves its
    results: then it is pinned. Where the user's checkpointing wants all of its results computed
    again, none of them is saved.
    """
    tags = [_tag(result.node, old) for result in loop.results]
    again = all(tag in RECOMPUTED for tag in tags)
    once = MUST_SAVE in tags or any(result.scale for result in loop.results)
    whole = Value(
        loop.name,
        0,
        loop.needs,
        CALL,
        loop.inner_bytes,
        us=loop.us,
        heavy=True,
        pinned=once,
        savable=False,
        tag=tags[0] if again else "",
    )
    items = (
        Value(r.name, r.bytes, (loop.name,), ITEM, savable=not again, tag=tag if again else "")
        for r, tag in zip(loop.results, tags, strict=True)
    )
    return [whole, *items]


def broken_policies(problem: CutProblem) -> dict[str, str]:
    """By region, a node that must be recomputed but that one of its loops would have to save.

    Such a loop has other results, which must not be recomputed.
    """
    old = {v.name: v for v in (*problem.values, *problem.backward)}
    return {
        region.region: result.node
        for region in problem.regions
        for mode in region.modes
        for loop in mode.loops
        if not loop_values(loop, old)[0].tag
        for result in loop.results
        if _tag(result.node, old) == MUST_RECOMPUTE
    }


def _tag(name: str, old: Mapping[str, Value]) -> str:
    """Of a view, its base's."""
    value = old[name]
    while value.kind in (VIEW, ITEM) and not (value.savable or value.tag):
        value = old[value.inputs[0]]
    return value.tag


class _Writer:
    def __init__(self, problem: CutProblem, loops: list[Loop]):
        self.problem = problem
        self.old = {v.name: v for v in (*problem.values, *problem.backward)}
        self.tangents = {v.name for v in problem.backward if not v.inputs}
        self.producer: dict[str, tuple[Loop, Result]] = {}
        for loop in loops:
            for result in loop.results:
                self.producer.setdefault(result.node, (loop, result))
        self.new: dict[str, Value] = {}
        self.backward: set[str] = set()

    def write(self) -> CutProblem:
        outputs = [*self.problem.outputs, *self.problem.gradients]
        live = self._live(outputs)
        for name, value in self.old.items():
            if name in live and name not in self.new:
                if name not in self.producer and all(map(self.new.__contains__, value.inputs)):
                    self._add(value)
                else:
                    self._require(name)
        forward_needed = self._ancestors(self.problem.outputs)
        values = [
            v
            if v.forward == (v.name in forward_needed)
            else dataclasses.replace(v, forward=not v.forward)
            for v in self.new.values()
            if v.name not in self.backward
        ]
        backward = tuple(v for v in self.new.values() if v.name in self.backward)
        return dataclasses.replace(
            self.problem,
            values=with_needs(values, backward, self.problem.gradients),
            backward=backward,
            regions=(),
        )

    # ---- order, as in loops/apply_plans.py -----------------------------------------------------
    def _deps(self, name: str) -> tuple[str, ...]:
        if name in self.producer:
            loop, result = self.producer[name]
            return (*loop.needs, result.scale) if result.scale else loop.needs
        return self.old[name].inputs

    def _live(self, names: list[str]) -> set[str]:
        found: set[str] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack.extend(self._deps(name))
        found.update(name for name, v in self.old.items() if not v.inputs)
        return found

    def _require(self, name: str) -> None:
        stack, path = [name], set[str]()
        while stack:
            top = stack[-1]
            missing = [] if top in self.new else [d for d in self._deps(top) if d not in self.new]
            if any(d in path or d == top for d in missing):
                loops = [self.producer[n][0].name for n in (top, *path) if n in self.producer]
                raise Cycle(loops[0])
            if missing:
                path.add(top)
                stack.extend(reversed(missing))
                continue
            stack.pop()
            path.discard(top)
            if top not in self.new:
                self._write(top)

    def _write(self, name: str) -> None:
        if name not in self.producer:
            self._add(self.old[name])
            return
        loop, result = self.producer[name]
        if loop.name not in self.new:
            for value in loop_values(loop, self.old):
                self._add(value)
        if result.name != name:
            self._add(result.finished(self.old[name]))

    def _add(self, value: Value) -> None:
        self.new[value.name] = value
        if value.name in self.tangents or not self.backward.isdisjoint(value.inputs):
            self.backward.add(value.name)

    def _ancestors(self, names: tuple[str, ...]) -> set[str]:
        found: set[str] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            if name not in found:
                found.add(name)
                stack.extend(self.new[name].inputs)
        return found
