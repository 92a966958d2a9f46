"""What a set of saved values means for backward: what it recomputes and reads, and whether it may.

What backward recomputes and reads: all functions walk from the values that backward needs towards
the inputs of the step, and stop at values that are free or saved.

**Checks of a plan**: backward gets each value it needs, and checkpoint policies hold. A value is
*available* in backward if it is free, if it is saved, or if it may be recomputed and all its inputs
are available. A plan is valid if every needed value is available, if no value is saved that cannot
be, and if what it offloads fits into the host's budget.

**What recomputation costs**: the heavy ops that backward repeats under a plan. Each op comes with
the time to repeat it and with the bytes that saving its results would take.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set

from mstpass.problem.op import ITEM
from mstpass.problem.problem import (
    MUST_OFFLOAD,
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    Plan,
    Value,
    pinned_bytes,
)
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


class InvalidPlan(Exception):
    """A plan that cannot be carried out; the message names the value and the reason."""


def checked_plan(problem: CutProblem, plan: object) -> Plan:
    """A copy of what a solver has returned, if that has the form of a plan.

    Raises:
        InvalidPlan: it is no `Plan`, its fields are of other types, or it names a region or a mode
            that the problem does not have.
    """
    if not isinstance(plan, Plan):
        raise InvalidPlan(f"it returned {reprlib.repr(plan)}, which is no Plan")
    for what in ("saved", "offloaded", "by_chunk"):
        names = getattr(plan, what)
        if not isinstance(names, Set) or not all(isinstance(name, str) for name in names):
            raise InvalidPlan(f"Plan.{what} is {reprlib.repr(names)}, which is no set of names")
    if not _are_levels(plan.nested):
        raise InvalidPlan(
            f"Plan.nested is {reprlib.repr(plan.nested)}, which is no mapping from names to levels "
            "from 1 on"
        )
    if not plan.by_chunk <= plan.offloaded:
        raise InvalidPlan(
            f"Plan.by_chunk has values that are not offloaded: "
            f"{sorted(plan.by_chunk - plan.offloaded)}"
        )
    if not isinstance(plan.modes, Mapping):
        raise InvalidPlan(f"Plan.modes is {reprlib.repr(plan.modes)}, which is no mapping")
    modes = dict(plan.modes)
    known = {region.region: {mode.name for mode in region.modes} for region in problem.regions}
    for region, mode in modes.items():
        if mode not in known.get(region, ()):
            raise InvalidPlan(f"the problem has no region {region!r} with a mode {mode!r}")
    sets = frozenset(plan.offloaded), frozenset(plan.by_chunk)
    return Plan(frozenset(plan.saved), modes, dict(plan.nested), *sets)


def _are_levels(nested: object) -> bool:
    return isinstance(nested, Mapping) and all(
        isinstance(name, str) and isinstance(level, int) and level >= 1
        for name, level in nested.items()
    )


def verify(
    problem: CutProblem,
    saved: Set[str],
    nested: Iterable[str] = (),
    offloaded: Set[str] = frozenset(),
) -> None:
    """Check a plan for a problem whose modes are chosen.

    Args:
        saved: names of the values that cross from forward to backward, as in ``Plan.saved``.
        nested: names of the values recomputed ahead of time, as in ``Plan.nested``.
        offloaded: names of the values that cross by way of the host, as in ``Plan.offloaded``.

    Raises:
        InvalidPlan: a needed value is not available, a saved one cannot be saved, an offloaded one
            cannot be offloaded, or a name is not one of the problem's values.
    """
    available: dict[str, bool] = {}
    for value in problem.values:
        if value.name in saved and not value.savable:
            raise InvalidPlan(f"{value.name} cannot be saved: {_why_not_savable(value)}")
        available[value.name] = (
            value.free
            or value.name in saved
            or (not problem.keeps(value) and all(available[name] for name in value.inputs))
        )
        if value.needed and not available[value.name]:
            raise InvalidPlan(
                f"backward needs {value.name}, which is not saved and cannot be recomputed"
                f"{_policy(value)}; save it, or the values it is computed from"
            )
    for what, names in (("saved", saved), ("nested", nested)):
        unknown = set(names) - available.keys()
        if unknown:
            raise InvalidPlan(
                f"the plan has {what} values that the problem does not have: {sorted(unknown)}"
            )

    _verify_offloaded(problem, saved, offloaded)


def _verify_offloaded(problem: CutProblem, saved: Set[str], offloaded: Set[str]) -> None:
    if not offloaded:
        return
    if problem.host is None:
        raise InvalidPlan("the plan offloads values, but this step has no host memory to use")
    if not offloaded <= saved:
        raise InvalidPlan(f"offloaded values are not saved: {sorted(offloaded - saved)}")
    values = [value for value in problem.values if value.name in offloaded]
    for value in values:
        if not value.offload:
            raise InvalidPlan(f"{value.name} cannot be offloaded: the caller holds it, or it is "
                              "small, not on a GPU, or not dense in memory")  # fmt: skip
    own = offloaded - must_offload(problem)
    needed = pinned_bytes(value.bytes for value in values if value.name in own)
    if needed > problem.host.budget_bytes:
        raise InvalidPlan(
            f"the plan offloads {needed} bytes, and host_budget is {problem.host.budget_bytes}"
        )


def _why_not_savable(value: Value) -> str:
    if value.tag in RECOMPUTED:
        return f"its checkpoint policy is {value.tag}"
    return "it is a view, or has no storage of its own; save the value that it shows"


def _policy(value: Value) -> str:
    return f" (its checkpoint policy is {value.tag})" if value.tag == MUST_SAVE else ""


@dataclasses.dataclass(frozen=True)
class HeavyOp:
    """A heavy op of the forward that backward repeats.

    Attributes:
        results: names of the values to save in order not to repeat it: the op's own value, or the
            items of a loop or of an attention that backward reads.
        bytes: size of all of these.
        us: time of the op, in microseconds.
    """

    results: frozenset[str]
    bytes: int
    us: float

    @property
    def us_per_byte(self) -> float:
        """Time won by each byte that is saved."""
        return self.us / max(1, self.bytes)


def recomputed_heavy_ops(problem: CutProblem, saved: Set[str]) -> list[HeavyOp]:
    """The heavy ops that backward repeats and whose results may be saved.

    The op that takes longest for its bytes comes first.
    """
    repeated = set(recomputed(problem, saved))
    ops: dict[str, tuple[Value, list[Value]]] = {}
    for value in problem.values:
        if value.name not in repeated:
            continue
        if value.heavy and value.forward:
            ops[value.name] = value, [value] if value.savable else []
        elif value.kind == ITEM and value.savable and value.inputs[0] in ops:
            ops[value.inputs[0]][1].append(value)
    found = [
        HeavyOp(frozenset(v.name for v in results), sum(v.bytes for v in results), op.us)
        for op, results in ops.values()
        if results
    ]
    return sorted(found, key=lambda op: -op.us_per_byte)
