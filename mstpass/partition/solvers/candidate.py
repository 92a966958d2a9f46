"""A plan that a search looks at, with the problem it speaks of and its simulation.

*Sequences* of such plans are how solvers turn a list into an answer for each budget. A sequence
does not depend on the budget. It begins with fast plans and goes on to plans that need less memory.
The answer for a budget is the first plan whose simulated peak is within it. As every solver takes
the first plan of one fixed sequence, a smaller budget never gives a higher peak.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

from mstpass.memory.simulate_plan import StepSimulation
from mstpass.partition.solvers.choose_modes import least_memory_modes, whole_modes
from mstpass.partition.solvers.min_cut import complete, min_cut
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import FREE_OVERHEAD, Alone, CutProblem, Plan
from mstpass.problem.saved_set import (
    InvalidPlan,
    must_offload,
    read_by_backward,
    saved_where,
    verify,
)

TIE = 1.005  # peaks up to this factor apart count as equal: the simulation is no more exact


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan, and the problem with the plan's modes chosen. It is simulated when first asked."""

    problem: CutProblem
    plan: Plan

    @functools.cached_property
    def simulation(self) -> StepSimulation:
        return StepSimulation.of(self.problem, self.plan)

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes

    @property
    def lowered_peak_bytes(self) -> int:
        """The peak with cheap values computed twice, where that lowers it."""
        return self.simulation.lowered_peak_bytes

    @property
    def us(self) -> float:
        return self.simulation.us

    @property
    def saved_bytes(self) -> int:
        """Bytes that cross on the device: all are in memory when forward ends, so that the peak is
        no lower."""
        on_device = self.plan.saved - self.plan.offloaded - must_offload(self.problem)
        return sum(v.bytes for v in self.problem.values if v.name in on_device)

    def lowered_within(self, limit_bytes: int) -> bool:
        """Whether the peak is at most that once cheap values are copied; simulated if it may be."""
        return self.saved_bytes <= limit_bytes and self.simulation.lowered_within(limit_bytes)


def fewest_saved_bytes(problem: CutProblem, modes: Mapping[str, str]) -> Candidate:
    """The plan with these modes that saves the fewest bytes and repeats no heavy op."""
    closed = with_modes(problem, modes)
    return Candidate(closed, Plan(min_cut(closed), modes))


def least_memory_loops(problem: CutProblem) -> Candidate:
    """Every region in the mode that needs least memory; no heavy op outside loops is repeated."""
    return fewest_saved_bytes(problem, least_memory_modes(problem))


def lowest_saved_set(problem: CutProblem, modes: Mapping[str, str]) -> Candidate:
    """The plan with these modes that has the lowest peak, of three saved sets.

    They are that of the fewest bytes, another one that prefers values which have a buffer in any
    case, and what torch saves of the values that no loop computes.
    """
    closed = with_modes(problem, modes)
    sets = [min_cut(closed), min_cut(closed, with_buffers_first=True)]
    if closed.torch_saved is not None:
        sets.append(_valid(closed, frozenset(closed.torch_saved)))
    return lowest(Candidate(closed, Plan(saved, modes)) for saved in dict.fromkeys(sets))


def lowest(candidates: Iterable[Candidate]) -> Candidate:
    """The candidate of the lowest peak; of equal peaks that of the fewest saved bytes, then the
    fastest."""
    return min(candidates, key=lambda c: (c.peak_bytes, c.saved_bytes, c.us))


def by_torch(problem: CutProblem) -> Candidate | None:
    """The step without any loop that saves what torch's partitioner does; None if unknown."""
    if problem.torch_saved is None:
        return None
    whole = dataclasses.replace(problem, regions=())
    saved = _valid(whole, frozenset(problem.torch_saved))
    return Candidate(whole, Plan(saved, whole_modes(problem)))


def without_loops(problem: CutProblem) -> Candidate:
    """The step without any loop, of the lower peak: what torch saves, or the fewest bytes that
    repeat no heavy op."""
    whole = dataclasses.replace(problem, regions=())
    fewest = Candidate(whole, Plan(min_cut(whole), whole_modes(problem)))
    torchs = problem.cached(by_torch)
    return fewest if torchs is None else min(fewest, torchs, key=lambda c: c.peak_bytes)


def baseline(problem: CutProblem) -> Alone:
    """The step under Inductor alone; where that is not known, the step without any loop."""
    if problem.alone is not None:
        return problem.alone
    found = problem.cached(by_torch) or problem.cached(without_loops)
    return Alone(found.us, found.peak_bytes)


def known_plans(problem: CutProblem) -> tuple[Candidate, ...]:
    """The plans without loops that need no search; none where some loops must stay."""
    if any(all(mode.loops for mode in region.modes) for region in problem.regions):
        return ()
    fewest, torchs = problem.cached(without_loops), problem.cached(by_torch)
    return (fewest,) if torchs is None or torchs is fewest else (fewest, torchs)


def _valid(closed: CutProblem, kept: frozenset[str]) -> frozenset[str]:
    """A saved set with these values, and the fewest bytes that backward needs besides."""
    free = closed.allowing(recompute_heavy=True)
    kept &= {value.name for value in closed.values if value.savable and not value.free}
    try:
        verify(free, kept)
    except InvalidPlan:
        kept = complete(closed, kept)
    return read_by_backward(free, kept)


def measured(problem: CutProblem, modes: Mapping[str, str], names: Set[str]) -> Candidate:
    """The plan with these modes that saves the values of these names, as ``saved_where``."""
    closed = with_modes(problem, modes)
    return Candidate(closed, Plan(saved_where(closed, lambda v: v.name in names), dict(modes)))


def first_within(sequence: Iterable[Candidate], budget_bytes: int | None) -> Plan:
    """The answer for a budget; the plan of the lowest peak if no plan is within it.

    The *free* plan is the one of the lowest peak among those that take at most ``FREE_OVERHEAD``
    more time than the fastest. It answers the budget None, and the search begins with it.
    """
    plans = list(sequence)
    limit_us = (1 + FREE_OVERHEAD) * min(plan.us for plan in plans)
    free = min((p for p in plans if p.us <= limit_us), key=lambda plan: plan.peak_bytes)
    if budget_bytes is None:
        return free.plan
    rest = plans[plans.index(free) :]
    within = (plan for plan in rest if plan.peak_bytes <= budget_bytes)
    return next(within, min(rest, key=lambda plan: plan.peak_bytes)).plan


Move = TypeVar("Move")


def by_halves(moves: Sequence[Move], make: Callable[[Sequence[Move]], bool]) -> None:
    """Make all of the moves, if they may be; otherwise the first half of them, then the second.

    Args:
        make: makes all moves that it is given, and returns whether it did.
    """
    if not moves or make(moves) or len(moves) == 1:
        return
    half = len(moves) // 2
    by_halves(moves[:half], make)
    by_halves(moves[half:], make)
