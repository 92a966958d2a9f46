"""Put a region's loops in the place of its members: from a problem with choices to one without.

The members of a loop vanish, but for those that something else reads as well; its results keep the
names of the nodes they stand for. The order stays, each loop just before its first result is read
(as chunk/apply.py writes it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mstpass.graph.memory import CALL, ITEM, POINTWISE
from mstpass.partition.problem import CutProblem, Loop, Result, Value, unscaled, with_needs


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
    chosen = [
        region[modes[region.region]] if region.region in modes else region.modes[0]
        for region in problem.regions
    ]
    loops = [loop for mode in chosen for loop in mode.loops]
    if not loops:
        return dataclasses.replace(problem, regions=())
    return _Writer(problem, loops).write()


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
                if name in self.producer or not self.new.keys() >= set(value.inputs):
                    self._require(name)
                else:
                    self._add(value)
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

    # ---- order, as in chunk/apply.py -------------------------------------------------------------
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
            self._add(
                Value(
                    loop.name,
                    0,
                    loop.needs,
                    CALL,
                    loop.inner_bytes,
                    us=loop.us,
                    heavy=True,
                    pinned=True,
                    savable=False,
                )
            )
            for item in loop.results:
                own = unscaled(item.node) if item.scale else item.node
                self._add(Value(own, item.bytes, (loop.name,), ITEM))
        if result.scale:
            old = self.old[name]
            inputs = (unscaled(name), result.scale)
            scaled = dataclasses.replace(old, inputs=inputs, kind=POINTWISE, heavy=False, us=0.0)
            self._add(scaled)

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
