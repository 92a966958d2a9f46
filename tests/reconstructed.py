"""Steps in which reconstruction has something to win, for its tests."""

from __future__ import annotations

from typing import Any

from mstpass import pipeline
from mstpass.options import Options
from mstpass.partition.solvers.checkpoints import ForwardPlaces, _with_loops_pinned
from mstpass.partition.solvers.min_cut import complete
from mstpass.plans import SavePlan
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.problem import CutProblem, Plan

MODES = ("off", "exact", "tolerant")
EVERY_PLACE = "every_place"  # the name under which a test registers ``save_at_every_place``


def save_at_every_place(problem: CutProblem, _: int | None) -> Plan:
    """A solver that saves at every narrow place.

    So both terms of a residual sum are saved, where better solvers recompute one of them.
    """
    closed = with_modes(problem, {}).allowing(recompute_heavy=True)
    line = ForwardPlaces(closed)
    kept = frozenset[str]().union(*map(line.names_at, line.places))
    return Plan(complete(_with_loops_pinned(closed), kept), {})


def split_step(graph: Any, outputs: int, mode: str, **options: Any) -> pipeline.Result:
    """The step split at the least memory, with a reconstruction mode."""
    given = {"solver": EVERY_PLACE, "reconstruct": mode, **options}
    given = {"memory_budget": 0.0, "chunk_tokens": 64, **given}
    return pipeline.run(graph, Options(**given), num_fwd_outputs=outputs)


def save_plan(result: pipeline.Result) -> SavePlan:
    assert result.outcome.save_plan is not None
    return result.outcome.save_plan
