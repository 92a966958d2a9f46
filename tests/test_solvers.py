"""Solvers on random steps: against every plan that there is, and against one another."""

from __future__ import annotations

import math
from unittest import mock

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mstpass.memory.simulate_plan import simulate_plan
from mstpass.partition.solvers import SOLVERS, sequence
from mstpass.partition.solvers.choose_modes import forms
from mstpass.partition.solvers.milp import prove
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import CALL, INPUT
from mstpass.problem.problem import CutProblem, Loop, LoopResult, Mode, Plan, RegionModes, Value
from mstpass.problem.saved_set import recomputed, verify
from tests.checks import examples
from tests.problems import every_plan, repeated_regions, steps

pytestmark = pytest.mark.sampled(5)

EXAMPLES = settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SHARES = st.floats(0.0, 1.0)
SEQUENCES = ("peak_search", "greedy", "knapsack")


def evaluated(problem: CutProblem, plan: Plan) -> tuple[int, float]:
    """Peak and time of a plan that must be valid."""
    closed = with_modes(problem, plan.modes).allowing(recompute_heavy=True)
    verify(closed, plan.saved, plan.nested)
    step = simulate_plan(problem, plan)
    return step.peak_bytes, step.us


@given(problem=steps(forward=5, backward=5), share=SHARES)
@EXAMPLES
def test_milp_and_the_others_against_every_plan(problem: CutProblem, share: float) -> None:
    plans = list(every_plan(problem))
    peaks = sorted(peak for _, peak, _ in plans)
    budget = peaks[int(share * (len(peaks) - 1))]
    best_us = min(us for _, peak, us in plans if peak <= budget)
    for name, solve in SOLVERS.items():
        peak_bytes, us = evaluated(problem, solve(problem, budget))
        assert peak_bytes > budget or us >= best_us - 1e-6, name
    proof = prove(problem, budget, time_limit_s=10.0)
    event(f"proven: {proof.proven}")
    assert proof.bound_us <= best_us * (1 + 1e-5) + 1e-6
    if proof.proven:
        peak_bytes, us = evaluated(problem, proof.plan)
        assert peak_bytes <= budget
        assert us == pytest.approx(best_us, rel=1e-5, abs=1e-6)


@given(problem=steps(forward=4, backward=4, regions=1))
@settings(EXAMPLES, max_examples=examples(100))
def test_milp_says_where_no_plan_is_within_the_budget(problem: CutProblem) -> None:
    lowest = min(peak for _, peak, _ in every_plan(problem))
    proof = prove(problem, lowest - 1)
    assert proof.proven
    assert proof.us == math.inf


def test_attention_may_be_whole_where_the_head_is_in_no_mixed_mode() -> None:
    """Else loops over heads to choose from made plans slower than without them."""

    def mode(kind: str, node: str, wide: bool = False, chunks: str = "") -> Mode:
        loop = Loop(f"mst_loop_{node}", (node,), ("x",), (LoopResult(node, 8),), 1, 1.0)
        return Mode(kind, (loop,), wide, chunks)

    values = (
        Value("x", 8, kind=INPUT, free=True),
        Value("attention", 8, ("x",), CALL),
        Value("head", 8, ("x",), CALL),
    )
    head = RegionModes("head", (mode("fused", "head"), mode("mixed", "head")))
    modes = mode("save", "attention", True, "short chunks"), mode("recompute", "attention", True)
    attention = RegionModes("attention", (Mode("whole"), *modes))
    problem = CutProblem(values, outputs=("attention", "head"), regions=(head, attention))
    found = [(form["head"], form["attention"]) for form in forms(problem)]
    assert len(set(found)) == len(found)
    assert ("fused", "whole") in found
    assert {attention for _, attention in found} == {"whole", "save, short chunks, block"}
    assert {head for head, _ in found[-2:]} <= {"fused", "mixed"}


@pytest.mark.parametrize("name", SEQUENCES)
@given(problem=steps(forward=12, backward=12), shares=st.lists(SHARES, min_size=2, max_size=4))
@settings(EXAMPLES, max_examples=examples(100))
def test_less_budget_never_means_a_higher_peak(
    name: str, problem: CutProblem, shares: list[float]
) -> None:
    solve = SOLVERS[name]
    highest, _ = evaluated(problem, solve(problem, None))
    budgets = [None, *(int(share * 1.2 * highest) + 1 for share in sorted(shares)[::-1])]
    peaks = [evaluated(problem, solve(problem, budget))[0] for budget in budgets]
    assert peaks == sorted(peaks, reverse=True)


def test_a_budget_changes_no_more_of_many_regions_than_it_has_to() -> None:
    """Steps of the search change several: five of thirty, where four were enough."""
    count, freed_bytes = 30, 9
    problem = repeated_regions(count)
    highest, _ = evaluated(problem, peak_search(problem, None))
    for changed in range(1, count):
        plan = peak_search(problem, highest - freed_bytes * changed)
        modes = list(plan.modes.values())
        assert modes.count("recompute") == changed, modes


def test_less_budget_never_means_a_higher_peak_within_a_large_step() -> None:
    """Loops that need much themselves: two regions in loops have a lower peak than three."""
    problem = repeated_regions(3, inner_bytes=25)
    highest, _ = evaluated(problem, peak_search(problem, None))
    with mock.patch.object(sequence, "_BETWEEN", 1):
        peaks = [evaluated(problem, peak_search(problem, b))[0] for b in range(highest, 0, -1)]
    assert peaks == sorted(peaks, reverse=True)


@given(problem=steps(forward=12, backward=12, regions=3), share=SHARES)
@settings(EXAMPLES, max_examples=examples(100))
def test_no_budget_takes_more_time_than_the_least_memory(problem: CutProblem, share: float) -> None:
    free, least = (simulate_plan(problem, peak_search(problem, b)) for b in (None, 0))
    lowest = least.lowered_peak_bytes
    budget = max(1, math.ceil(lowest + share * (free.lowered_peak_bytes - lowest)))
    within = simulate_plan(problem, peak_search(problem, budget))
    assert within.us <= max(free.us, least.us) * (1 + 1e-9)


@given(problem=steps(forward=12, backward=12, regions=3), budget=st.none() | st.integers(0, 300))
@settings(EXAMPLES, max_examples=examples(100))
def test_every_solver_s_plan_is_valid(problem: CutProblem, budget: int | None) -> None:
    for solve in SOLVERS.values():
        evaluated(problem, solve(problem, budget))


@given(problem=steps(forward=12, backward=12))
@settings(EXAMPLES, max_examples=examples(100))
def test_save_all_repeats_nothing_and_is_never_slower(problem: CutProblem) -> None:
    whole = CutProblem(problem.values, True, problem.backward, problem.outputs, problem.gradients)
    _, least_us = evaluated(whole, SOLVERS["save_all"](whole, 0))
    _, most_us = evaluated(whole, SOLVERS["recompute_all"](whole, 0))
    # What cannot be saved, or must not be, may run in the forward only to save what reads it.
    unsaved = [v for v in whole.values if v.tag == "must_recompute" or (v.us and not v.savable)]
    assert least_us <= most_us or unsaved
    again = recomputed(whole, SOLVERS["save_all"](whole, 0).saved)
    by_name = {value.name: value for value in whole.values}
    assert all(by_name[name].kind == "view" or by_name[name].tag for name in again)


@given(problem=steps(forward=12, backward=12))
@EXAMPLES
def test_copies_of_cheap_values_free_no_others(problem: CutProblem) -> None:
    """The search for the least memory leaves plans out by this bound of their lowered peaks."""
    for name in ("save_all", "recompute_all", "min_cut"):
        step = simulate_plan(problem, SOLVERS[name](problem, 0))
        event(f"lowered: {step.lowered_peak_bytes < step.peak_bytes}")
        assert step.least_lowered_bytes <= step.lowered_peak_bytes <= step.peak_bytes
