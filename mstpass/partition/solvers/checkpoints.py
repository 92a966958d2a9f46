"""Save what is alive at narrow places of the forward, and recompute all values between two of them.

In a transformer the narrow places lie between blocks, where little more than the residual stream is
alive. Saving the alive values there cuts the forward into segments. Backward recomputes a segment
just before it needs it, so that the other values of only one segment are in memory at a time::

    for each bound T on a segment's bytes:                              (forward_places.py)
        places = the cheapest set whose segments need at most T bytes
    take the set of places whose simulated peak is lowest

This is checkpointing at block boundaries (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174), with boundaries found in the graph. *Nested* checkpoints are two levels of
it (section 4.3 there)::

    fine, coarse = the places of two bounds T
    save at the coarse places
    at the others of the fine places: recompute the alive values from the coarse place before them,
        ahead of time, and keep nothing else of that pass
    recompute each segment between two fine places when its gradients need it

With places of a third bound T between these two there are three levels: on the way to a middle
place the fine ones are dropped; from there they are recomputed once more, ahead of time.

Such plans may repeat matmuls and attention: they pay time for memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.forward_places import ForwardPlaces
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.peak_floor import PeakFloor
from mstpass.problem.problem import CutProblem, Plan, is_loop
from mstpass.problem.saved_set import read_by_backward

_HIGHER = 3  # sets of places looked at on either side of the best one, whose peaks are no lower
_FINE = 3  # sets of places that fine places are taken from
_SPREAD = 2.0  # numbers of places are those of ``nested_checkpoints``, up to this factor

Places = Mapping[int, frozenset[str]]  # positions in the forward, each with the values alive there


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A saved set, and the places of the forward that it comes from.

    Attributes:
        places: where the alive values are saved, in order.
        nested_places: places between them, whose alive values are recomputed ahead of time.
        inner_places: places between all of these, for a third level.
        saved: names of the values alive at ``places``, and of those that must not be recomputed.
        simulation: the step under this plan.
    """

    places: Places
    nested_places: Places
    inner_places: Places
    saved: frozenset[str]
    simulation: StepSimulation

    def plan(self, modes: Mapping[str, str]) -> Plan:
        """The plan, for a problem in which ``modes`` are chosen."""
        return Plan(self.saved, modes, self.simulation.nested, inner=self.simulation.inner)

    def is_better_than(self, other: Checkpoints) -> bool:
        """Whether the peak is lower, or the time of an equal peak; simulated only if need be."""
        step, best = self.simulation, other.simulation
        floor_bytes = step.problem.cached(PeakFloor).bytes_of(self.saved - step.offloaded)
        if floor_bytes > best.peak_bytes or (floor_bytes == best.peak_bytes and step.us >= best.us):
            return False
        return (step.peak_bytes, step.us) < (best.peak_bytes, best.us)


def checkpoints(problem: CutProblem) -> Checkpoints:
    """The checkpoints of one level with the lowest simulated peak.

    Of equal peaks, those that recompute least.
    """
    line = problem.cached(_OneLevel)
    return functools.reduce(_better, line.with_loops_saved(), line.best)


def checkpoints_by_host(
    problem: CutProblem, peak_and_time: Callable[[Checkpoints], tuple[int, float]]
) -> Checkpoints:
    """The checkpoints of one level of the lowest peak, if their values may wait on the host.

    Args:
        peak_and_time: of the step whose saved values wait there.
    """
    return min(every_checkpoints(problem), key=peak_and_time)


def every_checkpoints(problem: CutProblem) -> Iterator[Checkpoints]:
    """Checkpoints of one level, from none to as many as there are."""
    line = ForwardPlaces(problem)
    for choice in line.choices():
        yield save_at(problem, {place: line.names_at(place) for place in choice})


def nested_checkpoints(problem: CutProblem) -> Checkpoints | None:
    """The checkpoints of two levels with the lowest simulated peak; None if there are none to try.

    For n fine places about n^(1/2) coarse ones are tried.
    """
    line = problem.cached(_OneLevel)
    flat, finest = line.flat, line.finest
    return _best(
        problem,
        (
            save_at(problem, coarse.places, _without(fine.places, coarse.places))
            for fine in finest
            for coarse in flat
            if _is_about(len(coarse.places), len(fine.places) ** (1 / 2))
        ),
    )


def twice_nested_checkpoints(problem: CutProblem) -> Checkpoints | None:
    """The same with three levels; None if there are none to try.

    For n fine places about n^(1/3) coarse and n^(2/3) middle ones are tried.
    """
    line = problem.cached(_OneLevel)
    flat, finest = line.flat, line.finest
    return _best(
        problem,
        (
            save_at(
                problem,
                coarse.places,
                middle := _without(medium.places, coarse.places),
                _without(fine.places, {**coarse.places, **middle}),
            )
            for fine in finest
            for coarse in flat
            if _is_about(len(coarse.places), len(fine.places) ** (1 / 3))
            for medium in flat
            if len(coarse.places) < len(medium.places) < len(fine.places)
            if _is_about(len(medium.places), len(fine.places) ** (2 / 3))
        ),
    )


def save_at(
    problem: CutProblem,
    places: Places,
    nested_places: Places | None = None,
    inner_places: Places | None = None,
) -> Checkpoints:
    """Checkpoints with given places; alive values at nested ones are recomputed ahead of time."""
    nested_places, inner_places = nested_places or {}, inner_places or {}
    saved = read_by_backward(problem, complete(problem, _alive_at(places)))
    nested = _alive_at(nested_places) - saved
    inner = _alive_at(inner_places) - saved - nested
    simulation = StepSimulation(problem, saved, nested | inner, inner=inner)
    return Checkpoints(places, nested_places, inner_places, saved, simulation)


def _alive_at(places: Places) -> frozenset[str]:
    return frozenset[str]().union(*places.values())


def _is_about(count: int, wanted: float) -> bool:
    return wanted / _SPREAD <= count <= wanted * _SPREAD


def _best(problem: CutProblem, tried: Iterable[Checkpoints]) -> Checkpoints | None:
    """The lowest peak of these, and of the best one with its last segment saved."""
    found = next(iter(tried := iter(tried)), None)
    if found is None:
        return None
    found = functools.reduce(_better, tried, found)
    return _better(found, _with_last_segment_saved(problem, found))


def _better(found: Checkpoints, other: Checkpoints) -> Checkpoints:
    return other if other.is_better_than(found) else found


class _OneLevel:
    """Checkpoints of one level, from none to many.

    The peak falls with the number of places, and rises again. So the search begins where the bytes
    saved and those of the widest segment are fewest together, and goes on in both directions until
    some peaks in a row are no lower.

    Attributes:
        best: those of the lowest peak.
    """

    def __init__(self, problem: CutProblem):
        self.problem = problem
        self._line = ForwardPlaces(problem)
        self._loops_pinned = _with_loops_pinned(problem)
        self._choices = self._line.choices()
        self._made: dict[int, Checkpoints] = {}
        begin = min(range(len(self._choices)), key=self._about_bytes)
        self._best, self.best = begin, self._of(begin)
        self._search(range(begin + 1, len(self._choices)))
        self._search(range(begin - 1, -1, -1))

    @property
    def flat(self) -> list[Checkpoints]:
        """All of them."""
        return [self._of(choice) for choice in range(len(self._choices))]

    @property
    def finest(self) -> list[Checkpoints]:
        """The best ones, and those with more places."""
        return self.flat[self._best :][:_FINE]

    def with_loops_saved(self) -> Iterator[Checkpoints]:
        """The same places, where backward repeats no loop."""
        for choice in range(len(self._choices)):
            yield save_at(self._loops_pinned, self._places(choice))

    def _search(self, choices: Iterable[int]) -> None:
        since_best = 0
        for choice in choices:
            since_best += 1
            if self._of(choice).is_better_than(self.best):
                self._best, self.best, since_best = choice, self._of(choice), 0
            if since_best == _HIGHER:
                break

    def _of(self, choice: int) -> Checkpoints:
        if choice not in self._made:
            self._made[choice] = save_at(self.problem, self._places(choice))
        return self._made[choice]

    def _places(self, choice: int) -> Places:
        return {place: self._line.names_at(place) for place in self._choices[choice]}

    def _about_bytes(self, choice: int) -> int:
        return self._line.about_peak_bytes(self._choices[choice])


def _with_loops_pinned(problem: CutProblem) -> CutProblem:
    values = (
        dataclasses.replace(value, pinned=True) if is_loop(value.name) and not value.tag else value
        for value in problem.values
    )
    return dataclasses.replace(problem, values=tuple(values))


def _with_last_segment_saved(problem: CutProblem, found: Checkpoints) -> Checkpoints:
    """Nested places after the last other place become places that are saved.

    Backward reads their values first, when few gradients are in memory: unless that is where the
    peak lies, nothing is won by recomputing them.
    """
    last = max(found.places, default=-1)
    nested, inner = (
        {place: names for place, names in places.items() if place < last}
        for places in (found.nested_places, found.inner_places)
    )
    repeated = {**found.nested_places, **found.inner_places}
    saved = {**found.places, **_without(repeated, {**nested, **inner})}
    return save_at(problem, saved, nested, inner)


def _without(places: Places, others: Places) -> Places:
    return {place: names for place, names in places.items() if place not in others}
