"""Choose which saved values to drop because backward can reconstruct them: a search on plain data.

::

    for each saved value T that saved values are computed from by cheap ops, in order:
        leave T out of the saved set
        compute what is available then (available_values.py); if a needed value is missing,
            save small values (one number a row, such as a norm's rstd) one by one
        drop T, if all needed values are available and fewer bytes are saved

Two rules keep time and error small. A heavy value is recomputed only if the plan recomputed it
before, so reconstruction never costs a matmul. A saved value that a reconstruction reads is never
dropped later, so errors do not add up over layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set

from mstpass.partition.reconstruct.available_values import ALSO_SAVED, FREE, SAVED, Derivations
from mstpass.partition.reconstruct.rule import Inverse
from mstpass.problem.problem import CutProblem
from mstpass.problem.saved_set import recomputed

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
    search = _Search(Derivations(problem, inverses, set(recomputed(problem, saved))))
    kept = frozenset(saved)
    drops: list[DroppedValue] = []
    read_by_drops: set[str] = set()
    for name in _candidates(problem, kept):
        if name in read_by_drops:
            continue
        in_use = {inverse for drop in drops for inverse in drop.inverses}
        found = search.drop(name, kept, in_use)
        if found is None:
            continue
        drop, read = found
        drops.append(drop)
        kept = kept - {name} | set(drop.also_saved)
        read_by_drops |= read
    return Decision(kept, search.steps(kept), tuple(drops))


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


class _Search:
    def __init__(self, graph: Derivations):
        self.graph = graph
        self.values = graph.values

    def drop(
        self, name: str, saved: frozenset[str], in_use: Set[Inverse]
    ) -> tuple[DroppedValue, set[str]] | None:
        """The drop of one saved value, and the saved values it reads; None if the value must stay.

        Args:
            in_use: the inverses that earlier drops need.
        """
        number = self.graph.index[name]
        value = self.values[number]
        small = [
            i
            for i in self.graph.savable_sources
            if self.values[i].bytes * _SMALL <= value.bytes and i != number
        ]
        available = self.graph.available(saved - {name}, small)
        if available is None:
            return None
        used = set(self.graph.support(available, self.graph.needed))
        also_saved = sorted(i for i in used if available[i] == ALSO_SAVED)
        inverses = [how for i, how in available.items() if i in used and isinstance(how, Inverse)]
        new = [inverse for inverse in inverses if inverse not in in_use]
        won_bytes = value.bytes - sum(self.values[i].bytes for i in also_saved)
        if won_bytes <= 0 or not new:
            return None
        drop = DroppedValue(
            name, tuple(new), tuple(self.values[i].name for i in also_saved), won_bytes
        )
        read = self.graph.support(available, [self.graph.index[i.target] for i in new])
        return drop, {self.values[i].name for i in read if available[i] == SAVED}

    def steps(self, saved: frozenset[str]) -> tuple[tuple[str, Step], ...]:
        """The values that backward computes under a saved set, each with its step."""
        available = self.graph.available(saved)
        assert available is not None, "the available is known"
        used = set(self.graph.support(available, self.graph.needed))
        return tuple(
            (self.values[i].name, how if isinstance(how, Inverse) else None)
            for i, how in available.items()
            if i in used and how not in (FREE, SAVED)
        )
