"""Plans with fewer loops, for steps whose plan raises the simulated peak or takes too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

import networkx as nx

from mstpass.graph.joint import JointGraph
from mstpass.options import Options
from mstpass.partition.solvers import AUTO
from mstpass.partition.solvers.candidate import TIE, Candidate, lowest_saved_set, without_loops
from mstpass.partition.solvers.free_plan import (
    free_plan,
    loops_that_help,
    only_loops_that_help,
    within_free_time,
)
from mstpass.pipeline_stages import Planned
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import WHOLE, CutProblem, Mode
from mstpass.problem.saved_set import must_offload

FORCED_MAY_RAISE = TIE  # the peak by this factor: loops that ``chunk_tokens`` asks for


def with_loops_in_bounds(planned: Planned, traced: JointGraph, options: Options) -> Planned:
    """The plan; one with fewer loops if it raises the simulated peak, or a free one takes too long.

    The peak of the step under Inductor alone, and of that without loops, is the bound.
    """
    if not planned.is_known:
        return planned
    attempts: list[Planned] = []
    for attempt in _with_fewer_loops(planned, traced):
        if _takes_too_long(attempt, options):
            continue
        attempts.append(attempt)
        if not _raises_peak(attempt, options):
            break
    else:
        return min(attempts, key=lambda found: found.peak_bytes, default=attempt)
    if attempt is planned and options.chunk_tokens is not None and not planned.limit.is_free:
        return _with_loops_that_help(planned)
    return attempt


def _takes_too_long(planned: Planned, options: Options) -> bool:
    """Whether a free plan takes more time than ``free_overhead`` allows.

    Only the default solver is held to that. The user may ask for loops, and some must stay.
    """
    if not planned.limit.is_free or planned.solver != AUTO or options.chunk_tokens is not None:
        return False
    forced = any(region.unbounded for region in planned.chunk_plans)
    forced |= bool(must_offload(planned.problem))  # a checkpoint policy asks for copies
    return planned.extra_time > options.free_overhead and not forced


def _raises_peak(planned: Planned, options: Options) -> bool:
    """Whether a plan raises the simulated peak above that of the step without loops.

    A solver that the user asks for may save what it likes where there are no loops.
    """
    regions, peak_bytes = planned.chunk_plans, planned.peak_bytes
    if not regions:
        return planned.solver == AUTO and planned.before.peak_bytes < peak_bytes / TIE
    if all(region.unbounded for region in regions):  # those keep their loops
        return False
    most_bytes = peak_bytes / (1.0 if options.chunk_tokens is None else FORCED_MAY_RAISE)
    whole = planned.problem.cached(without_loops)
    return min(planned.before.peak_bytes, whole.peak_bytes) < most_bytes


def _with_fewer_loops(planned: Planned, traced: JointGraph) -> Iterator[Planned]:
    """The plan, and then plans with fewer loops.

    The second plan keeps the loops that do not raise the simulated peak. The last one is for the
    graph as it was traced: that of Inductor alone or, without a budget, the free plan without
    loops. A region whose token count varies keeps its loops in any case: they lower the peak of
    longer batches. Where there is one, or where it is not known what Inductor alone would do, the
    last plan keeps these loops alone.
    """
    yield planned
    problem, found = _with_choice(planned)
    fewer = loops_that_help(problem, found)
    if planned.limit.is_free:
        fewer = within_free_time(problem, fewer)
    if fewer is not found:
        yield dataclasses.replace(planned, problem=problem, plan=fewer.plan)
    varying = _unbounded(planned)
    if planned.alone is not None and not varying:
        overhead = planned.problem.free_overhead
        alone = dataclasses.replace(planned.alone.problem, free_overhead=overhead)
        plan = free_plan(alone).plan if planned.limit.is_free else planned.alone.plan
        plan = dataclasses.replace(plan, modes={c.region: WHOLE for c in planned.candidates})
        yield dataclasses.replace(planned, joint=traced, problem=alone, plan=plan)
    else:
        whole = {r.region: WHOLE for r in problem.regions if r.region not in varying}
        least = lowest_saved_set(problem, {**planned.plan.modes, **whole})
        yield dataclasses.replace(planned, problem=problem, plan=least.plan)


def _with_loops_that_help(planned: Planned) -> Planned:
    """The plan without those loops that raise the simulated peak, if that lowers it.

    For plans whose loops the user asks for: a solver could not leave them out.
    """
    problem, found = _with_choice(planned)
    try:
        fewer = only_loops_that_help(problem, found)
    except (Cycle, nx.NetworkXUnbounded):  # such as graphs that only torch can split
        return planned
    if fewer.peak_bytes >= planned.peak_bytes / FORCED_MAY_RAISE:
        return planned
    return dataclasses.replace(planned, problem=problem, plan=fewer.plan)


def _with_choice(planned: Planned) -> tuple[CutProblem, Candidate]:
    """The problem in which regions may stay whole, but for unbounded ones, and the plan for it."""
    problem = _with_whole_modes(planned.problem, _unbounded(planned))
    return problem, Candidate(with_modes(problem, planned.plan.modes), planned.plan)


def _unbounded(planned: Planned) -> set[str]:
    return {c.region for c in planned.candidates if c.unbounded}


def _with_whole_modes(problem: CutProblem, but: Set[str]) -> CutProblem:
    """The problem in which each region may stay whole, but for some."""
    regions = (
        region
        if region.region in but or not all(mode.loops for mode in region.modes)
        else dataclasses.replace(region, modes=(*region.modes, Mode(WHOLE)))
        for region in problem.regions
    )
    return dataclasses.replace(problem, regions=tuple(regions))
