"""Plans with fewer loops, for steps whose plan raises the simulated peak or takes too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

import networkx as nx

from mstpass.graph.joint import JointGraph
from mstpass.loops.mode_costs import WHOLE
from mstpass.partition.solvers.candidate import Candidate, lowest_saved_set
from mstpass.partition.solvers.free_plan import free_plan
from mstpass.partition.solvers.free_time import within_free_time
from mstpass.partition.solvers.loops_that_help import loops_that_help, only_loops_that_help
from mstpass.pipeline_stages import Planned
from mstpass.problem.apply_modes import Cycle, with_modes
from mstpass.problem.problem import CutProblem, Mode


def with_fewer_loops(planned: Planned, traced: JointGraph) -> Iterator[Planned]:
    """The plan, and then, for the case that its graphs are refused, plans with fewer loops.

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


def with_loops_that_help(planned: Planned, peak_bytes: float) -> Planned | None:
    """The plan without those loops that raise the simulated peak.

    For plans whose loops the user asks for: a solver could not leave them out.

    Args:
        peak_bytes: the plan's own peak. None if the new plan's is not below it.
    """
    problem, found = _with_choice(planned)
    try:
        fewer = only_loops_that_help(problem, found)
    except (Cycle, nx.NetworkXUnbounded):  # such as graphs that only torch can split
        return None
    if fewer.peak_bytes >= peak_bytes:
        return None
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
