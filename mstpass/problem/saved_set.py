"""What a set of saved values means for backward: what it recomputes, and what it reads.

All functions walk from the values that backward needs towards the inputs of the step, and stop at
values that are free or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from mstpass.problem.problem import MUST_OFFLOAD, CutProblem, Value
from mstpass.walk import walk_once


def saved_where(problem: CutProblem, keep: Callable[[Value], bool]) -> frozenset[str]:
    """The saved set in which the walk stops at each value for which ``keep`` holds.

    The walk goes on to the inputs of the values that are not kept. A value that backward can get in
    no other way is saved even where ``keep`` is false.
    """
    problem = problem.allowing(recompute_heavy=True)
    not_recomputable = _not_recomputable(problem)
    candidates = (value for value in problem.values if value.savable and not value.free)
    kept = {v.name for v in candidates if v.name in not_recomputable or keep(v)}
    return read_by_backward(problem, kept)


def _not_recomputable(problem: CutProblem) -> set[str]:
    """Values that no saved set without them lets backward recompute."""
    found: set[str] = set()
    savable = {value.name for value in problem.values if value.savable}
    for value in problem.values:
        lost_input = any(name in found and name not in savable for name in value.inputs)
        if not value.free and (problem.keeps(value) or lost_input):
            found.add(value.name)
    return found


def recomputed(problem: CutProblem, saved: Set[str]) -> list[str]:
    """The values that backward recomputes, in topological order."""
    reached = _reached(problem, saved)
    return [v.name for v in problem.values if v.name in reached and not _available(v, saved)]


def read_by_backward(problem: CutProblem, saved: Set[str]) -> frozenset[str]:
    """The saved values that backward reads, in order to use them or to recompute others."""
    return frozenset(_reached(problem, saved) & saved)


def must_offload(problem: CutProblem) -> frozenset[str]:
    """The values that must cross by way of the host if they are saved."""
    return problem.cached(_must_offload)


def _must_offload(problem: CutProblem) -> frozenset[str]:
    if problem.host is None:
        return frozenset()
    return frozenset(value.name for value in problem.values if value.offload == MUST_OFFLOAD)


def _reached(problem: CutProblem, saved: Set[str]) -> set[str]:
    """What backward reads or recomputes, and the free and saved values at which that ends."""
    by_name = {value.name: value for value in problem.values}
    inputs = lambda name: () if _available(by_name[name], saved) else by_name[name].inputs
    return set(walk_once((value.name for value in problem.values if value.needed), inputs))


def _available(value: Value, saved: Set[str]) -> bool:
    return value.free or value.name in saved
