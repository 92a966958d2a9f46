"""Spend the free plan's extra time where it frees most: keep nothing of some MLPs.

A region that saves by choice can recompute instead. The extra time is estimated as its share of
the step's floating point operations, times ``_SLOWDOWN`` for what recomputation costs beyond that
(memory traffic of the intermediates, shorter products).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstpass.graph.cost import flops, total_flops
from mstpass.graph.joint import JointGraph, nbytes
from mstpass.plans import RECOMPUTE, SAVE, ChunkPlan

_SLOWDOWN = 2.0


def spend(
    joint: JointGraph,
    plans: Sequence[ChunkPlan],
    free_overhead: float,
    recomputing: Callable[[ChunkPlan], ChunkPlan],
) -> list[ChunkPlan]:
    """Plans with some regions switched to recompute, the most bytes a flop first.

    Args:
        free_overhead: extra time allowed, a fraction of the step.
        recomputing: makes a region's plan that recomputes from the one that saves.
    """
    left = free_overhead * total_flops(joint.nodes)
    saving = [plan for plan in plans if plan.mode == SAVE and plan.saved]
    switched: dict[int, ChunkPlan] = {}
    for plan in sorted(saving, key=lambda p: -_bytes_per_flop(joint, p)):
        cost = _SLOWDOWN * _recompute_flops(joint, plan)
        if cost <= left:
            left -= cost
            switched[id(plan)] = recomputing(plan)
            assert switched[id(plan)].mode == RECOMPUTE
    return [switched.get(id(plan), plan) for plan in plans]


def _recompute_flops(joint: JointGraph, plan: ChunkPlan) -> int:
    """Of the forward nodes that backward would redo: those that produce the saved values."""
    return sum(flops(joint.by_name[name]) for name in plan.saved)


def _bytes_per_flop(joint: JointGraph, plan: ChunkPlan) -> float:
    saved_bytes = sum(nbytes(joint.by_name[name]) for name in plan.saved)
    return saved_bytes / max(1, _recompute_flops(joint, plan))
