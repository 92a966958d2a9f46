"""Peak against time: the plans that a step would have at other memory budgets."""

from __future__ import annotations

import dataclasses

import networkx as nx
from torch import fx

from mstpass import pipeline
from mstpass.limit import Limit
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.budget import peak_limit_bytes
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.candidate import baseline
from mstpass.problem.apply_modes import Cycle
from mstpass.problem.verify import InvalidPlan
from mstpass.report.details import ParetoPoint

BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.1, 0.0)


def pareto_points(
    result: pipeline.Result,
    module: fx.GraphModule,
    options: Options,
    limit: Limit,
    num_fwd_outputs: int,
) -> tuple[ParetoPoint, ...]:
    """The plan at hand and plans at ``BUDGETS``, the highest peak first.

    The plan at hand has the simulated peak of its final graphs. The others are solved on one
    partition problem and not applied; their peaks are the solver's, which may differ from those of
    final graphs by some percent.
    """
    outcome = result.outcome
    if outcome.peak_bytes is None or outcome.extra_time is None:
        return ()
    at_hand = _budget_of(limit, options)
    points = [ParetoPoint(_label(at_hand), outcome.peak_bytes, outcome.extra_time, chosen=True)]
    # The problem of any budget below 1.0 has all modes; solving it is quickest with min_cut.
    quick = dataclasses.replace(options, solver="min_cut")
    any_budget = Limit(share=BUDGETS[2])
    planned = pipeline.run(
        module, quick, limit=any_budget, num_fwd_outputs=num_fwd_outputs, stop_after="plan"
    )
    problem = planned.problem
    assert problem is not None, "the problem is known"
    before_us = problem.cached(baseline).us or 1.0
    solve = SOLVERS[AUTO if options.solver == "auto" else options.solver]
    for budget in BUDGETS:
        if budget == at_hand:
            continue
        try:
            most_bytes = peak_limit_bytes(problem, Limit(share=budget), solve)
            step = simulate_plan(problem, solve(problem, most_bytes))
            peak_bytes, extra = step.peak_bytes, step.us / before_us - 1
            if most_bytes is not None and peak_bytes > most_bytes:
                peak_bytes = step.lowered_peak_bytes
        except (InvalidPlan, Cycle, KeyError, nx.NetworkXUnbounded):
            continue  # a user's own solver may fail at some budgets
        points.append(ParetoPoint(_label(budget), peak_bytes, extra))
    points.sort(key=lambda point: (-point.peak_bytes, point.extra_time))
    return tuple(points)


def _budget_of(limit: Limit, options: Options) -> object:
    """The budget of the plan at hand, as a user writes it."""
    if limit.share is not None:
        return limit.share
    return limit.budget_bytes if options.memory_budget == "auto" else options.memory_budget


def _label(budget: object) -> str:
    return f"memory_budget={budget}"
