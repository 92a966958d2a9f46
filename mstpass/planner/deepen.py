"""The partition problem of a deep model, from that of a shallow copy: one layer is repeated.

A trace takes as long as the model is deep, and a search for a length needs several. In the problem
of a few layers, one in the middle reads what the layer before it has made, and is read by the next
one, as all do. So it is written again as often as layers are missing.

*Alike* are values that do in two layers that follow each other what the same line of the model
computes. They are found from one attention and the next: the operands of values that are alike are
alike, and so are their readers of the same kind. Values that are alike from layer to layer make a
*chain*. The middle layer is a stretch of each list of values, from one member of a chain to the
next; where it lies in one list follows from what it reads in others. ::

    chain     ... -1    0                          1 ...       places of members, before
              ... -1    0    1     2   ...   n   n + 1 ...     behind, with n copies of 0
    operand   as far from the value that reads it as before

The copy stands for a model whose layers are alike, by their modules (`models.are_alike`).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from mstpass.planner.traced_step import TracedStep
from mstpass.problem.names import renamed
from mstpass.problem.op import CALL
from mstpass.problem.problem import CutProblem, RegionModes, Value

_ATTENTION = "scaled_dot_product"
_NameOf = Callable[[str], str]


class NoShallowCopy(Exception):
    """The model has no copy of few layers that stands for the whole."""


class CannotDeepen(NoShallowCopy):
    """The layers are not alike."""


def deepened(traced: TracedStep, layers: int, depth: int) -> TracedStep:
    """The traced step of a model with ``depth`` layers, from that of its first ``layers``.

    Raises:
        CannotDeepen: the layers differ, or the problem does not show which values are a layer's.
    """
    problems = {}
    logits, exchanges, narrow = set(traced.logits), set(traced.exchanges), dict(traced.narrow)
    for budget, problem in traced.problems.items():
        try:
            more = _Layers(problem, layers, depth - layers)
            problems[budget] = _in_order(more.problem())
        except (KeyError, ValueError) as error:  # a value is read that no layer has
            raise CannotDeepen(str(error)) from error
        logits.update(more.with_copies(traced.logits))
        exchanges.update(more.with_copies(traced.exchanges))
        narrow.update((n, text) for name, text in traced.narrow.items() for n in more.copies(name))
    return dataclasses.replace(
        traced,
        problems=problems,
        logits=frozenset(logits),
        exchanges=frozenset(exchanges),
        narrow=narrow,
    )


def _in_order(problem: CutProblem) -> CutProblem:
    """The problem.

    Raises:
        CannotDeepen: a value comes before what it reads.
    """
    known: set[str] = set()
    for value in (*problem.values, *problem.backward):
        if not known.issuperset(value.inputs):
            raise CannotDeepen(f"{value.name} comes before what it reads")
        known.add(value.name)
    return problem


@dataclasses.dataclass(frozen=True)
class _Place:
    """A member of a chain: the chain's number, and the distance from the member to be repeated."""

    chain: int
    layer: int


class _Layers:
    """One problem, and its middle layer."""

    def __init__(self, problem: CutProblem, layers: int, count: int):
        self.old, self.count = problem, count
        self.values = {v.name: v for v in (*problem.values, *problem.backward)}
        self.order = {name: i for i, name in enumerate(self.values)}
        self.readers = collections.defaultdict[str, list[str]](list)
        for value in self.values.values():
            for name in dict.fromkeys(value.inputs):
                self.readers[name].append(value.name)
        self.kind = {name: self._kind(value) for name, value in self.values.items()}
        self.next = self._alike(self._attention(layers))
        self.previous = {after: name for name, after in self.next.items()}
        self.place: dict[str, _Place] = {}
        self.member: dict[_Place, str] = {}
        self.before: dict[str, list[str]] = {}  # the values whose copies come before a value
        start = self._attention(layers)[-2]
        self._find_places(start)
        if start not in self.place:
            raise CannotDeepen(f"{start} is not as the attention of the next layer")

    @staticmethod
    def _kind(value: Value) -> object:
        return value.renamed(lambda operand: "", name="", node="")

    def _attention(self, layers: int) -> list[str]:
        """The attention of each layer."""
        found = [v.name for v in self.old.values if v.kind == CALL and _ATTENTION in v.name]
        if len(found) != layers:
            raise CannotDeepen(f"{len(found)} calls of attention in {layers} layers")
        return found

    def _alike(self, starts: Sequence[str]) -> dict[str, str]:
        """For each value the one that is alike in the next layer."""
        found: dict[str, str] = {}
        taken: set[str] = set()
        pairs = collections.deque(itertools.pairwise(starts))
        while pairs:
            one, other = pairs.popleft()
            if one == other or one in found or other in taken:
                continue
            if self.kind[one] != self.kind[other]:
                continue
            found[one] = other
            taken.add(other)
            pairs += zip(self.values[one].inputs, self.values[other].inputs, strict=True)
            of_one, of_other = self._readers_by_kind(one), self._readers_by_kind(other)
            for kind, names in of_one.items():
                pairs += zip(names, of_other.get(kind, ()), strict=False)
        return found

    def _readers_by_kind(self, name: str) -> dict[object, list[str]]:
        found: dict[object, list[str]] = {}
        for reader in self.readers[name]:
            key = self.kind[reader], self.values[reader].inputs.index(name)
            found.setdefault(key, []).append(reader)
        return found

    # ---- the middle layer ----------------------------------------------------------------------
    def _find_places(self, start: str) -> None:
        """Give the values of all chains that the middle layer has a value of their places."""
        names = list(self.values)
        queue = collections.deque([start])
        while queue:
            name = queue.popleft()
            if name in self.place or not (name in self.next or name in self.previous):
                continue
            end, ascends = self._end(name)
            inside = [n for n in names[self.order[name] : end] if n not in self.place]
            inside = [n for n in inside if n in self.next or n in self.previous]
            for one in inside:
                self._place_chain(one)
            self.before.setdefault(names[end] if ascends else name, []).extend(inside)
            for one in inside:
                queue += (*self.values[one].inputs, *self.readers[one])

    def _end(self, name: str) -> tuple[int, bool]:
        """Where the stretch of the middle layer ends that begins with a value, and whether the next
        layer comes behind it: in the backward it comes before."""
        later = [n for n in (self.next.get(name), self.previous.get(name)) if n is not None]
        ends = [self.order[n] for n in later if self.order[n] > self.order[name]]
        if len(ends) != 1:
            raise CannotDeepen(f"{name} lies at the end of its chain")
        ascends = self.order.get(self.next.get(name, ""), -1) == ends[0]
        return ends[0], ascends

    def _place_chain(self, name: str) -> None:
        chain, first, layer = len(self.place), name, 0
        while first in self.previous:
            first, layer = self.previous[first], layer - 1
            if first == name:
                raise CannotDeepen(f"{name} is alike to itself, as if layers alternated")
        member: str | None = first
        while member is not None:
            self.place[member] = place = _Place(chain, layer)
            self.member[place] = member
            member, layer = self.next.get(member), layer + 1

    # ---- the deep problem ----------------------------------------------------------------------
    def problem(self) -> CutProblem:
        """The problem with copies of the middle layer."""
        old = self.old
        return dataclasses.replace(
            old,
            values=tuple(self._with_copies_of(old.values)),
            backward=tuple(self._with_copies_of(old.backward)),
            gradients=tuple(self.with_copies(old.gradients)),
            torch_saved=None
            if old.torch_saved is None
            else tuple(self.with_copies(old.torch_saved)),
            regions=tuple(self._regions()),
        )

    def copies(self, name: str) -> list[str]:
        """The copies of a value, if it is the middle layer's."""
        if self.place.get(name, _Place(0, 1)).layer != 0:
            return []
        return [_copy(name, number) for number in range(1, self.count + 1)]

    def with_copies(self, names: Iterable[str]) -> list[str]:
        return [n for name in names for n in (name, *self.copies(name))]

    def _with_copies_of(self, values: Sequence[Value]) -> Iterator[Value]:
        for value in values:
            inside = [self.values[name] for name in self.before.get(value.name, ())]
            numbers: Iterable[int] = range(1, self.count + 1)
            if inside and self._is_descending(inside[0]):
                numbers = reversed(range(1, self.count + 1))
            for number in numbers:
                yield from (self._value(one, 0, number) for one in inside)
            place = self.place.get(value.name)
            yield self._value(value, place.layer, 0) if place is not None else value

    def _is_descending(self, value: Value) -> bool:
        return not self._end(value.name)[1]

    def _value(self, value: Value, layer: int, number: int) -> Value:
        name = _copy(value.name, number) if number else value.name
        return value.renamed(lambda operand: self._at(operand, layer, number), name=name)

    def _at(self, name: str, layer: int, number: int) -> str:
        """What stands for an operand that a value of a layer reads, or a copy of that value."""
        place = self.place.get(name)
        if place is None:
            return name
        reader = number or (layer if layer <= 0 else layer + self.count)
        wanted = reader + place.layer - layer
        if wanted <= 0:
            return self.member[_Place(place.chain, wanted)]
        if wanted <= self.count:
            return _copy(self.member[_Place(place.chain, 0)], wanted)
        return self.member[_Place(place.chain, wanted - self.count)]

    # ---- regions -------------------------------------------------------------------------------
    def _regions(self) -> Iterator[RegionModes]:
        for region in self.old.regions:
            place = self.place.get(region.region)
            if place is None:
                yield region
                continue
            yield self._region(region, place.layer, 0)
            if place.layer == 0:
                for number in range(1, self.count + 1):
                    yield self._region(region, 0, number)

    def _region(self, region: RegionModes, layer: int, number: int) -> RegionModes:
        return renamed(region, lambda name: self._at(name, layer, number))


def _copy(name: str, number: int) -> str:
    return f"{name}@{number}"
