"""Which saved values to drop: a search on plain data.

What backward can have is a least fixed point over ANDs and ORs: a value is *had* if it is free or
saved, if it may be recomputed and all inputs are had, or if all sources of one of its inverses are.
Each value is noted with the step by which it was first had, and every step's sources were had
before it, so what comes out has no circle: ``b`` from ``c - a`` and ``a`` from ``c - b`` never
support each other, with neither saved nor recomputed.

    for each saved value T that some saved value is computed from without a slow op, in order:
        leave T out; take the fixed point, inverses only where recomputing ends,
        small values (one number a row: a norm's rstd) saved as a last resort
        all of backward's needs are had, for fewer bytes:  T stays out

A heavy value is only recomputed where the plan did so before: reconstruction never costs a matmul.
Saved values that the steps read are kept; a value is not reconstructed from a reconstructed one
that is farther on, so errors do not add up over layers.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from mstpass.partition.reconstruct.rule import Inverse
from mstpass.problem.problem import CutProblem, Value
from mstpass.problem.saved_set import recomputed

SMALL = 8  # an extra row statistic may weigh 1/8 of what it replaces
_LEAST_SHARE = 1024  # of the saved bytes: what is worth a search

Step = Inverse | None  # None: its own op, once more


@dataclasses.dataclass(frozen=True)
class Drop:
    """One saved value left out: the inverses that it needs, what else was saved, bytes won."""

    target: str
    inverses: tuple[Inverse, ...]
    extras: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """The new saved set, and how backward has each value that is not saved, in a legal order."""

    saved: frozenset[str]
    steps: tuple[tuple[str, Step], ...]
    drops: tuple[Drop, ...]


def decide(problem: CutProblem, saved: Set[str], inverses: Sequence[Inverse]) -> Decision:
    """Drop what can be had otherwise. Without a drop the saved set is the given one."""
    search = _Search(problem, inverses, set(recomputed(problem, saved)))
    kept = frozenset(saved)
    drops: list[Drop] = []
    locked: set[str] = set()
    for name in _candidates(problem, kept, inverses):
        if name in locked:
            continue
        done = {inverse for drop in drops for inverse in drop.inverses}
        found = search.without(name, kept, done)
        if found is None:
            continue
        drop, read = found
        drops.append(drop)
        kept = kept - {name} | set(drop.extras)
        locked |= read
    return Decision(kept, search.steps(kept), tuple(drops))


def _candidates(problem: CutProblem, saved: Set[str], inverses: Sequence[Inverse]) -> Iterator[str]:
    """Saved values that others of their kind are computed from by cheap ops, in order."""
    anchored: set[str] = set()
    for value in reversed(problem.values):
        if value.free or problem.keeps(value) or value.heavy:
            continue
        if value.name in saved or value.name in anchored:
            anchored.update(value.inputs)
    total = sum(value.bytes for value in problem.values if value.name in saved)
    for value in problem.values:
        if value.name in saved & anchored and value.bytes * _LEAST_SHARE >= total:
            yield value.name


class _Search:
    """The fixed point, and what it is asked. Values are numbered in topological order."""

    def __init__(self, problem: CutProblem, inverses: Sequence[Inverse], redone: Collection[str]):
        self.problem = problem
        self.values = problem.values
        self.index = {value.name: i for i, value in enumerate(self.values)}
        known = [
            inverse
            for inverse in inverses
            if inverse.target in self.index and all(s in self.index for s in inverse.sources)
        ]
        # An action makes its target had once all its sources are.
        self.actions: list[tuple[int, Step]] = []
        self.missing: list[int] = []
        self.waiting: list[list[int]] = [[] for _ in self.values]
        for i, value in enumerate(self.values):
            again = not problem.keeps(value) and (not value.heavy or value.name in redone)
            if again and not value.free:
                self._action(i, None, value.inputs)
        for inverse in known:
            self._action(self.index[inverse.target], inverse, inverse.sources)
        rows = {source for inverse in known for source in inverse.sources}
        self.extras = sorted(self.index[name] for name in rows if self._savable(name))
        self.needed = [i for i, value in enumerate(self.values) if value.needed]

    def _action(self, target: int, step: Step, sources: Sequence[str]) -> None:
        distinct = {self.index[name] for name in sources}
        for source in distinct:
            self.waiting[source].append(len(self.actions))
        self.actions.append((target, step))
        self.missing.append(len(distinct))

    def _savable(self, name: str) -> bool:
        value = self.values[self.index[name]]
        return value.savable and value.bytes > 0 and not value.free

    def without(
        self, name: str, saved: frozenset[str], done: Set[Inverse]
    ) -> tuple[Drop, set[str]] | None:
        """The drop of one value, and the saved values that it reads; None if it must stay.

        ``done`` are the inverses that are in use without it.
        """
        value = self.values[self.index[name]]
        small = [i for i in self.extras if self._is_row(i, value)]
        had = self._fixed_point(saved - {name}, small)
        if had is None:
            return None
        used = set(self._support(had, self.needed))
        new = sorted(i for i in used if had[i] == "extra")
        found = [s for i in had if i in used and isinstance(s := had[i], Inverse)]
        found = [inverse for inverse in found if inverse not in done]
        won = value.bytes - sum(self.values[i].bytes for i in new)
        if won <= 0 or not found:
            return None
        drop = Drop(name, tuple(found), tuple(self.values[i].name for i in new), won)
        reads = self._support(had, [self.index[inverse.target] for inverse in found])
        return drop, {self.values[i].name for i in reads if had[i] == "saved"}

    def _is_row(self, i: int, value: Value) -> bool:
        return self.values[i].bytes * SMALL <= value.bytes and self.values[i].name != value.name

    def steps(self, saved: frozenset[str]) -> tuple[tuple[str, Step], ...]:
        """How each value is had that backward needs and that is neither free nor saved."""
        had = self._fixed_point(saved, [])
        assert had is not None
        used = set(self._support(had, self.needed))
        return tuple(
            (self.values[i].name, step if isinstance(step, Inverse) else None)
            for i, step in had.items()
            if i in used and step not in ("free", "saved")
        )

    def _fixed_point(
        self, saved: Set[str], small: Sequence[int]
    ) -> dict[int, Inverse | str] | None:
        """Each value that backward can have, with its step, in the order in which it is had.

        None if a needed value is not among them.
        """
        point = _Point(self)
        for i, value in enumerate(self.values):
            if value.free or value.name in saved:
                point.reach(i, "free" if value.free else "saved")
        point.settle()
        extras = iter(small)
        while not all(i in point.had for i in self.needed):
            extra = next((i for i in extras if i not in point.had), None)
            if extra is None:
                return None
            point.reach(extra, "extra")
            point.settle()
        return point.had

    def _support(self, had: Mapping[int, Inverse | str], roots: Sequence[int]) -> list[int]:
        """The roots and all that their steps read."""
        found: dict[int, None] = {}
        stack = list(roots)
        while stack:
            i = stack.pop()
            if i in found:
                continue
            found[i] = None
            step = had[i]
            if isinstance(step, Inverse):
                stack += [self.index[name] for name in step.sources]
            elif step == "again":
                stack += [self.index[name] for name in self.values[i].inputs]
        return list(found)


class _Point:
    """A growing set of values that backward has."""

    def __init__(self, search: _Search):
        self.search = search
        self.had: dict[int, Inverse | str] = {}
        self.missing = list(search.missing)
        self.again = collections.deque(a for a, count in enumerate(search.missing) if not count)
        self.inverse: collections.deque[int] = collections.deque()

    def reach(self, i: int, step: Inverse | str) -> None:
        if i in self.had:
            return
        self.had[i] = step
        for action in self.search.waiting[i]:
            self.missing[action] -= 1
            if self.missing[action] == 0:
                recomputes = self.search.actions[action][1] is None
                (self.again if recomputes else self.inverse).append(action)

    def settle(self) -> None:
        """All that follows; by an inverse only what cannot be recomputed."""
        while self.again or self.inverse:
            target, step = self.search.actions[(self.again or self.inverse).popleft()]
            self.reach(target, step or "again")
