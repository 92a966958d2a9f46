"""Save what is alive at narrow places of the forward, and recompute all values between two of them.

In a transformer the narrow places lie between blocks, where little more than the residual stream is
alive. Saving the alive values there cuts the forward into segments. Backward recomputes a segment
just before it needs it, so that the other values of only one segment are in memory at a time. This
is checkpointing at block boundaries (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv 1604.06174), with boundaries found in the graph.

Which places are saved, which are recomputed ahead of time from those before them (*nested*
checkpoints, of any number of levels), and which are not kept is found for each room at once::

    places = the narrow places                                           (forward_places.py)
    costs = what the segments between them need and take                 (segment_costs.py)
    placements = the fastest for each room, by dynamic programming       (checkpoint_table.py)

Such plans may repeat matmuls and attention: they pay time for memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.checkpoint_table import CheckpointTable, Costs, Placement
from mstpass.partition.solvers.forward_places import ForwardPlaces
from mstpass.partition.solvers.min_cut import complete
from mstpass.partition.solvers.peak_floor import PeakFloor
from mstpass.partition.solvers.segment_costs import segment_costs
from mstpass.problem.problem import CutProblem, is_loop
from mstpass.problem.saved_set import read_by_backward

_TRIED = 4  # placements of the least room that are simulated: their order is that of estimates
_FIRST = 3  # first stops without which the best of them is simulated as well
_BY_HOST = 16  # placements that are tried with values on the host
_PLACES_OF_LAYER = 4  # at most
_COARSE, _FINE = 256, 512  # cells of a table
_ROUNDED = 1.2  # what is alive at stops takes whole cells

Places = Mapping[int, frozenset[str]]  # positions in the forward, each with the values alive there


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A saved set, and the places of the forward that it comes from.

    Attributes:
        places: where the alive values are saved, in order.
        saved: names of the values alive at ``places``, and of those that must not be recomputed.
        simulation: the step in which these are saved.
    """

    places: Places
    saved: frozenset[str]
    simulation: StepSimulation

    def is_better_than(self, other: Checkpoints) -> bool:
        """Whether the peak is lower, or the time of an equal peak; simulated only if need be."""
        step, best = self.simulation, other.simulation
        floor_bytes = step.problem.cached(PeakFloor).bytes_of(self.saved - step.offloaded)
        if floor_bytes > best.peak_bytes or (floor_bytes == best.peak_bytes and step.us >= best.us):
            return False
        return (step.peak_bytes, step.us) < (best.peak_bytes, best.us)


class Chain:
    """The forward as a chain of segments, with the modes of one or several problems.

    Args:
        problems: of one step, each with other modes chosen.
        more: of each problem, sets of values that the forward may save besides.

    Attributes:
        places: where values may be saved: the values alive there.
        forms: of each form of a segment (checkpoint_table.py) the number of its problem, and what
            more the forward saves of each segment.
    """

    def __init__(
        self, problems: Sequence[CutProblem], more: Sequence[Sequence[frozenset[str]]] = ((),)
    ):
        self.problems = problems
        first, *others = (ForwardPlaces(problem) for problem in problems)
        self.positions = first.spaced(others)
        self.places = [first.names_at(place) for place in self.positions]
        read = [
            segment_costs(problem, self.places, sets)
            for problem, sets in zip(problems, more, strict=True)
        ]
        self.forms = [(number, saved) for number, one in enumerate(read) for saved in one.saved]
        self.costs = Costs(
            [form for one in read for form in one.forms],
            read[0].forward_us,
            np.max([one.between_bytes for one in read], axis=0),
            read[0].new_bytes,
            read[0].pinned_bytes,
        )
        self._most_bytes = _ROUNDED * self.costs.most_bytes

    @functools.cached_property
    def one_level(self) -> list[Placement]:
        """Placements without nested stops, from the fewest places to the least room."""
        table = CheckpointTable(self.costs, self._most_bytes, _COARSE)
        near = 1.1 * table.placements(levels=0)[-1].room_bytes
        return CheckpointTable(self.costs, near, _FINE).placements(levels=0)

    @functools.cached_property
    def on_host(self) -> list[Placement]:
        """The same if what is alive at stops takes no room."""
        table = CheckpointTable(self.costs, self._most_bytes, _COARSE)
        return table.placements(levels=0, host_bytes=math.inf)

    def table(self, most_bytes: float) -> CheckpointTable:
        """The placements of all rooms up to the given one."""
        return CheckpointTable(self.costs, most_bytes, _FINE)

    def levels(self, placement: Placement) -> dict[str, int]:
        """The values that are stored in a placement, each with its lowest level."""
        found: dict[str, int] = {}
        for segment, form in enumerate(placement.forms):
            found.update(dict.fromkeys(self.forms[form][1][segment], 0))
        for stop, level in placement.levels.items():
            for name in self.places[stop - 1]:
                found[name] = min(level, found.get(name, level))
        return found

    def checkpoints(self, placement: Placement) -> Checkpoints:
        """Those of a placement without nested stops."""
        stops = sorted(stop - 1 for stop in placement.levels)
        places = {self.positions[stop]: self.places[stop] for stop in stops}
        return save_at(self.problems[0], places)


def checkpoints(problem: CutProblem) -> Checkpoints:
    """The checkpoints of one level with the lowest simulated peak.

    Of equal peaks, those that recompute least.
    """
    has_loops = any(is_loop(value.name) for value in problem.values)
    problems = (problem, _with_loops_pinned(problem)) if has_loops else (problem,)
    chains = [one.cached(one_chain) for one in problems]
    found = _lowest(c.checkpoints(p) for c in chains for p in reversed(c.one_level[-_TRIED:]))
    # The last ops of the backward run in another order where the first block is recomputed whole.
    stops = list(found.places.items())
    fewer = (dict(stops[count:]) for count in range(1, min(_FIRST, len(stops)) + 1))
    return _lowest((found, *(save_at(found.simulation.problem, places) for places in fewer)))


def _lowest(every: Iterable[Checkpoints]) -> Checkpoints:
    return functools.reduce(lambda best, one: one if one.is_better_than(best) else best, every)


def checkpoints_by_host(
    problem: CutProblem, peak_and_time: Callable[[Checkpoints], tuple[int, float]]
) -> Checkpoints:
    """The checkpoints of one level of the lowest peak, if their values may wait on the host.

    Args:
        peak_and_time: of the step whose saved values wait there.
    """
    return min(every_checkpoints(problem), key=peak_and_time)


def every_checkpoints(problem: CutProblem) -> Iterator[Checkpoints]:
    """Checkpoints of one level, from few to as many as there are; then those at every k-th place.

    In equal layers the latter lie at the same place of each.
    """
    chain = problem.cached(one_chain)
    placements = chain.on_host
    for number in sorted({i * (len(placements) - 1) // (_BY_HOST - 1) for i in range(_BY_HOST)}):
        yield chain.checkpoints(placements[number])
    stops = list(zip(chain.positions, chain.places, strict=True))
    for step in range(2, _PLACES_OF_LAYER + 1):
        for first in range(step):
            yield save_at(problem, dict(stops[first::step]))


def one_chain(problem: CutProblem) -> Chain:
    """The chain of a problem whose modes are chosen."""
    return Chain([problem])


def save_at(problem: CutProblem, places: Places) -> Checkpoints:
    """Checkpoints with given places."""
    alive = frozenset[str]().union(*places.values())
    saved = read_by_backward(problem, complete(problem, alive))
    return Checkpoints(places, saved, StepSimulation(problem, saved))


def _with_loops_pinned(problem: CutProblem) -> CutProblem:
    values = (
        dataclasses.replace(value, pinned=True) if is_loop(value.name) and not value.tag else value
        for value in problem.values
    )
    return dataclasses.replace(problem, values=tuple(values))
