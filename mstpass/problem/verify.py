"""Check a solver's answer: every need of backward met, nothing saved that may not be, and the
user's checkpoint policies kept."""

from __future__ import annotations

from collections.abc import Set

from mstpass.problem.problem import MUST_SAVE, RECOMPUTED, CutProblem, Value


class InvalidPlan(Exception):
    """A saved set that does not give backward what it needs; the message names the value."""


def verify(problem: CutProblem, saved: Set[str], nested: Set[str] = frozenset()) -> None:
    """Raise ``InvalidPlan`` unless every needed value is free, saved or recomputable, and all the
    named values are the problem's."""
    available: dict[str, bool] = {}
    for value in problem.values:
        if value.name in saved and not value.savable:
            raise InvalidPlan(f"{value.name} is saved but {_why_not_savable(value)}")
        available[value.name] = (
            value.free
            or value.name in saved
            or (not problem.keeps(value) and all(available[name] for name in value.inputs))
        )
        if value.needed and not available[value.name]:
            raise InvalidPlan(
                f"backward needs {value.name}, which is neither saved nor recomputable{_why(value)}"
            )
    for what, names in (("saved", saved), ("nested", nested)):
        unknown = names - available.keys()
        if unknown:
            raise InvalidPlan(f"{what} values that the problem does not have: {sorted(unknown)}")


def _why_not_savable(value: Value) -> str:
    if value.tag in RECOMPUTED:
        return f"its checkpoint policy is {value.tag}"
    return "is a view or has no storage of its own"


def _why(value: Value) -> str:
    return f": its checkpoint policy is {value.tag}" if value.tag == MUST_SAVE else ""


def recomputed(problem: CutProblem, saved: Set[str]) -> list[str]:
    """The values that backward recomputes under a saved set, in topological order."""
    found = _reached(problem, saved)
    return [v.name for v in problem.values if v.name in found and not _given(v, saved)]


def read(problem: CutProblem, saved: Set[str]) -> frozenset[str]:
    """The saved values that backward has a use for."""
    return frozenset(_reached(problem, saved) & saved)


def _reached(problem: CutProblem, saved: Set[str]) -> set[str]:
    """What backward needs, down to values that are free or saved."""
    by_name = {value.name: value for value in problem.values}
    stack = [v.name for v in problem.values if v.needed]
    found: set[str] = set()
    while stack:
        value = by_name[stack.pop()]
        if value.name not in found:
            found.add(value.name)
            stack.extend(() if _given(value, saved) else value.inputs)
    return found


def _given(value: Value, saved: Set[str]) -> bool:
    return value.free or value.name in saved
