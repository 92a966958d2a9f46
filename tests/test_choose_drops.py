"""Which saved values reconstruction drops: certificates on random problems, and cases by hand."""

from __future__ import annotations

import dataclasses

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from mstpass.partition.reconstruct.choose_drops import Decision, choose_drops
from mstpass.partition.reconstruct.rules import TOLERANT, Inverse
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.problem.problem import CutProblem, Value
from mstpass.problem.saved_set import InvalidPlan, read_by_backward, verify
from tests.checks import examples
from tests.problems import forwards


def _inverse(target: str, *sources: str) -> Inverse:
    return Inverse(target, sources, sources[0], "sum", TOLERANT)


def _check(problem: CutProblem, saved: frozenset[str], decision: Decision) -> None:
    """Every step's sources are there before it, and all needs are met: no circle can pass."""
    by_name = {value.name: value for value in problem.values}
    available = {value.name for value in problem.values if value.free} | set(decision.saved)
    for name, step in decision.steps:
        value = by_name[name]
        assert step is None or step.target == name
        assert set(value.inputs if step is None else step.sources) <= available, name
        assert step is not None or not value.pinned
        available.add(name)
    assert all(value.name in available for value in problem.values if value.needed)
    assert all(by_name[name].savable for name in decision.saved)
    size = lambda names: sum(by_name[name].bytes for name in names)
    won = sum(drop.bytes for drop in decision.drops)
    assert size(decision.saved) == size(saved) - won
    assert won > 0 if decision.drops else decision.saved == saved


@given(problem=forwards(), data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_decisions_on_random_problems(problem: CutProblem, data: st.DataObject) -> None:
    try:
        saved = read_by_backward(problem, min_cut(problem))
        verify(problem, saved)
    except (InvalidPlan, nx.NetworkXUnbounded):
        return  # a needed view of a heavy view: no plan exists
    inverses = [
        _inverse(target, value.name, *[name for name in value.inputs if name != target])
        for value in problem.values
        for target in value.inputs
        if data.draw(st.booleans())
    ]
    _check(problem, saved, choose_drops(problem, saved, inverses))


def _sum_of_two(*, needed: bool = True) -> CutProblem:
    return CutProblem(
        (
            Value("a", 8, (), pinned=True, needed=True),
            Value("b", 8, (), pinned=True, needed=True),
            Value("c", 8, ("a", "b"), needed=needed),
        )
    )


def test_one_of_a_sum_is_dropped_never_two() -> None:
    """b from c - a and a from c - b at once would be a circle."""
    problem = _sum_of_two()
    inverses = [_inverse("a", "c", "b"), _inverse("b", "c", "a")]
    decision = choose_drops(problem, frozenset("abc"), inverses)
    assert len(decision.saved) == 2 and "c" in decision.saved
    _check(problem, frozenset("abc"), decision)


def test_a_sum_that_is_recomputed_wins_nothing() -> None:
    """With a and b saved, c costs nothing: there is nothing to win by subtracting."""
    problem = _sum_of_two()
    decision = choose_drops(
        problem, frozenset("ab"), [_inverse("a", "c", "b"), _inverse("b", "c", "a")]
    )
    assert decision.drops == () and decision.saved == frozenset("ab")


def test_a_row_statistic_is_saved_in_place_of_what_it_was_computed_from() -> None:
    problem = CutProblem(
        (
            Value("x", 64, (), pinned=True),
            Value("rstd", 1, ("x",)),
            Value("y", 64, ("x", "rstd"), needed=True),
            Value("z", 64, ("y",), pinned=True),
            Value("xhat", 64, ("x",), needed=True),
        )
    )
    saved = frozenset({"x", "y"})
    verify(problem, saved)
    decision = choose_drops(problem, saved, [_inverse("x", "y", "rstd")])
    assert decision.saved == {"y", "rstd"} and decision.drops[0].also_saved == ("rstd",)
    assert decision.drops[0].bytes == 63
    too_large = CutProblem(tuple(v if v.name != "rstd" else _wide(v) for v in problem.values))
    assert choose_drops(too_large, saved, [_inverse("x", "y", "rstd")]).drops == ()


def _wide(value: Value) -> Value:
    return Value(value.name, 32, value.inputs)


def test_no_heavy_value_is_recomputed_that_was_not_before() -> None:
    problem = CutProblem(
        (
            Value("x", 8, (), free=True),
            Value("a", 8, ("x",), heavy=True, needed=True),
            Value("b", 8, (), pinned=True, needed=True),
            Value("c", 8, ("a", "b"), needed=True),
        ),
        recompute_heavy=True,
    )
    inverses = [_inverse("b", "c", "a")]
    assert choose_drops(problem, frozenset("bc"), inverses).saved == {"c"}  # a is recomputed anyway
    assert choose_drops(problem, frozenset("abc"), []).saved == frozenset("abc")


def test_what_magnifies_errors_reads_no_coarse_value() -> None:
    """``a`` = c - b, where c has become narrow: what the cast cut off may be more than a."""
    problem = CutProblem(
        (
            Value("a", 64, (), pinned=True, needed=True),
            Value("b", 1, (), free=True),
            Value("c", 64, ("a", "b"), savable=False),
            Value("narrow", 32, ("c",), needed=True),
        )
    )
    cast = Inverse("c", ("narrow",), "narrow", "cast", TOLERANT)
    difference = _inverse("a", "c", "b")
    saved = frozenset({"a", "narrow"})
    assert choose_drops(problem, saved, [cast, difference]).saved == {"narrow"}
    cast = dataclasses.replace(cast, coarse=True)
    assert choose_drops(problem, saved, [cast, difference]).saved == {"narrow"}
    difference = dataclasses.replace(difference, magnifies=True)
    assert choose_drops(problem, saved, [cast, difference]).saved == saved
