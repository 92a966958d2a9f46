"""Choose which saved values to drop because backward can reconstruct them: a search on plain data.

::

    for each saved value T that saved values are computed from by cheap ops, in order:
        leave T out of the saved set
        compute what is available then (``Derivations``); if a needed value is missing,
            save small values (one number a row, such as a norm's rstd) one by one
        drop T, if all needed values are available and fewer bytes are saved

Two rules keep time and error small. A heavy value is recomputed only if the plan recomputed it
before, so reconstruction never costs a matmul. A saved value that a reconstruction reads is never
dropped later, so errors do not add up over layers.

Which values backward can get from a saved set, and how, is a least fixed point over ANDs and ORs.
A value is *available* in backward if

- it is free or saved, or
- it may be recomputed, and all its inputs are available, or
- one of its inverses has all its sources available.

Values become available one after the other, each by a *derivation* whose sources became available
before it. So no two values are ever derived from each other, as ``b = c - a`` and ``a = c - b``
would be with neither of them saved.

A value is *coarse* if an inverse gives it with fewer digits than its type has, or if it is computed
from such a value. An inverse that magnifies errors reads no coarse value: what a bfloat16 number
c = 6 leaves open, 0.012, is more than all of a difference c - a = 0.004.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from mstpass.partition.reconstruct.rules import Inverse
from mstpass.problem.problem import CutProblem
from mstpass.problem.saved_set import recomputed
from mstpass.walk import walk_once

FREE, SAVED, ALSO_SAVED, RECOMPUTED = "free", "saved", "also saved", "recomputed"

# How each available value is derived, by its number, in the order in which they became available.
Available = Mapping[int, Inverse | str]


class Derivations:
    """All derivations of a problem's values. Values are numbered as in ``problem.values``.

    A heavy value is recomputed only if the plan recomputes it anyway: reconstruction never costs a
    matmul.
    """

    def __init__(
        self, problem: CutProblem, inverses: Sequence[Inverse], plan_recomputes: Collection[str]
    ):
        """
        Args:
            inverses: how values follow from later ones.
            plan_recomputes: names of the values that backward recomputes without reconstruction.
        """
        self.values = problem.values
        self.index = {value.name: i for i, value in enumerate(self.values)}
        self.needed = [i for i, value in enumerate(self.values) if value.needed]
        known = [
            inverse
            for inverse in inverses
            if inverse.target in self.index and all(s in self.index for s in inverse.sources)
        ]
        self.derivations: list[tuple[int, Inverse | None]] = []  # target; None: by its own op
        self.sources: list[set[int]] = []  # by derivation
        self.read_by: list[list[int]] = [[] for _ in self.values]  # derivations, by source
        for i, value in enumerate(self.values):
            cheap = not value.heavy or value.name in plan_recomputes
            if cheap and not problem.keeps(value) and not value.free:
                self._add(i, None, value.inputs)
        for inverse in known:
            self._add(self.index[inverse.target], inverse, inverse.sources)
        sources = {source for inverse in known for source in inverse.sources}
        self.savable_sources = sorted(self.index[n] for n in sources if self._is_savable(n))

    def _add(self, target: int, inverse: Inverse | None, sources: Iterable[str]) -> None:
        distinct = {self.index[name] for name in sources}
        for source in distinct:
            self.read_by[source].append(len(self.derivations))
        self.derivations.append((target, inverse))
        self.sources.append(distinct)

    def _is_savable(self, name: str) -> bool:
        value = self.values[self.index[name]]
        return value.savable and value.bytes > 0 and not value.free

    def available(self, saved: Set[str], last_resort: Iterable[int] = ()) -> Available | None:
        """The values that backward can get; None if a needed value is not among them.

        Args:
            saved: names of the saved values.
            last_resort: numbers of values to save as well, one by one, while a needed value is
                missing.
        """
        point = _FixedPoint(self)
        for i, value in enumerate(self.values):
            if value.free or value.name in saved:
                point.reach(i, FREE if value.free else SAVED)
        point.settle()
        rest = iter(last_resort)
        while not all(i in point.available for i in self.needed):
            extra = next((i for i in rest if i not in point.available), None)
            if extra is None:
                return None
            point.reach(extra, ALSO_SAVED)
            point.settle()
        return point.available

    def support(self, available: Available, roots: Iterable[int]) -> list[int]:
        """The roots, and all values that their derivations read."""

        def sources(i: int) -> Iterable[int]:
            how = available[i]
            if isinstance(how, Inverse):
                return (self.index[name] for name in how.sources)
            return (self.index[name] for name in self.values[i].inputs if how == RECOMPUTED)

        return list(walk_once(roots, sources))

    def drop(
        self, name: str, saved: frozenset[str], in_use: Set[Inverse]
    ) -> tuple[DroppedValue, set[str]] | None:
        """The drop of one saved value, and the saved values it reads; None if the value must stay.

        Args:
            in_use: the inverses that earlier drops need.
        """
        number = self.index[name]
        value = self.values[number]
        small = [
            i
            for i in self.savable_sources
            if self.values[i].bytes * _SMALL <= value.bytes and i != number
        ]
        available = self.available(saved - {name}, small)
        if available is None:
            return None
        used = set(self.support(available, self.needed))
        also_saved = sorted(i for i in used if available[i] == ALSO_SAVED)
        inverses = [how for i, how in available.items() if i in used and isinstance(how, Inverse)]
        new = [inverse for inverse in inverses if inverse not in in_use]
        won_bytes = value.bytes - sum(self.values[i].bytes for i in also_saved)
        if won_bytes <= 0 or not new:
            return None
        drop = DroppedValue(
            name, tuple(new), tuple(self.values[i].name for i in also_saved), won_bytes
        )
        read = self.support(available, [self.index[i.target] for i in new])
        return drop, {self.values[i].name for i in read if available[i] == SAVED}

    def steps(self, saved: frozenset[str]) -> tuple[tuple[str, Step], ...]:
        """The values that backward computes under a saved set, each with its step."""
        available = self.available(saved)
        assert available is not None, "the available is known"
        used = set(self.support(available, self.needed))
        return tuple(
            (self.values[i].name, how if isinstance(how, Inverse) else None)
            for i, how in available.items()
            if i in used and how not in (FREE, SAVED)
        )


class _FixedPoint:
    """A growing set of available values.

    Of several derivations of a value, recomputation comes before an inverse, which may cost
    accuracy.
    """

    def __init__(self, graph: Derivations):
        self.graph = graph
        self.available: dict[int, Inverse | str] = {}
        self.missing = list(map(len, graph.sources))  # not available yet, by derivation
        self.recomputations = collections.deque(
            d for d, count in enumerate(self.missing) if not count
        )
        self.inverses: collections.deque[int] = collections.deque()
        self.coarse: set[int] = set()

    def reach(self, i: int, how: Inverse | str) -> None:
        """Make a value available, and queue the derivations of which it was the last source."""
        if i in self.available:
            return
        self.available[i] = how
        for derivation in self.graph.read_by[i]:
            self.missing[derivation] -= 1
            if self.missing[derivation] == 0:
                _, inverse = self.graph.derivations[derivation]
                (self.inverses if inverse else self.recomputations).append(derivation)

    def settle(self) -> None:
        """Make everything available that follows."""
        while self.recomputations or self.inverses:
            derivation = (self.recomputations or self.inverses).popleft()
            target, inverse = self.graph.derivations[derivation]
            reads_coarse = not self.coarse.isdisjoint(self.graph.sources[derivation])
            if target in self.available or (inverse and inverse.magnifies and reads_coarse):
                continue
            if reads_coarse or (inverse and inverse.coarse):
                self.coarse.add(target)
            self.reach(target, inverse or RECOMPUTED)


_SMALL = 8  # a small value has at most 1/8 of the bytes of the one that is dropped
_LEAST_SHARE = 1024  # a value of less than 1/1024 of the saved bytes is not worth a search

Step = Inverse | None  # how backward computes a value: by an inverse, or (None) by its own op


@dataclasses.dataclass(frozen=True)
class DroppedValue:
    """One saved value that is left out.

    Attributes:
        target: its name.
        inverses: the inverses that only this drop needs.
        also_saved: names of the small values that are saved in its place.
        bytes: bytes won, net of those.
    """

    target: str
    inverses: tuple[Inverse, ...]
    also_saved: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """A new saved set, and how backward computes the other values.

    Attributes:
        saved: names of the values to save.
        steps: each value that backward computes with its step, in an order in which every step
            reads values before it.
        drops: the saved values that were left out.
    """

    saved: frozenset[str]
    steps: tuple[tuple[str, Step], ...]
    drops: tuple[DroppedValue, ...]


def choose_drops(problem: CutProblem, saved: Set[str], inverses: Sequence[Inverse]) -> Decision:
    """DroppedValue the saved values that can be reconstructed for fewer bytes.

    Args:
        problem: a problem whose modes are chosen.
        saved: names of the values that a solver saves.
        inverses: the inverses that may be used.
    """
    graph = Derivations(problem, inverses, set(recomputed(problem, saved)))
    kept = frozenset(saved)
    drops: list[DroppedValue] = []
    read_by_drops: set[str] = set()
    for name in _candidates(problem, kept):
        if name in read_by_drops:
            continue
        in_use = {inverse for drop in drops for inverse in drop.inverses}
        found = graph.drop(name, kept, in_use)
        if found is None:
            continue
        drop, read = found
        drops.append(drop)
        kept = kept - {name} | set(drop.also_saved)
        read_by_drops |= read
    return Decision(kept, graph.steps(kept), tuple(drops))


def _candidates(problem: CutProblem, saved: Set[str]) -> Iterator[str]:
    """The saved values that other saved values are computed from by cheap ops, in order."""
    lead_to_saved: set[str] = set()
    for value in reversed(problem.values):
        if value.free or problem.keeps(value) or value.heavy:
            continue
        if value.name in saved or value.name in lead_to_saved:
            lead_to_saved.update(value.inputs)
    total = sum(value.bytes for value in problem.values if value.name in saved)
    for value in problem.values:
        if value.name in saved & lead_to_saved and value.bytes * _LEAST_SHARE >= total:
            yield value.name
