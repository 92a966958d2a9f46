"""Spend the free plan's extra time where it frees most: keep less of the MLPs.

A region that saves by choice can redo some of its matmuls in the backward loop instead of keeping
their results. The extra time of one is estimated as its share of the step's floating point
operations, times ``_SLOWDOWN`` for what it costs beyond them (memory traffic, short products).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mstpass.graph import ops
from mstpass.graph.cost import flops, total_flops
from mstpass.graph.joint import JointGraph, nbytes
from mstpass.plans import SAVE, ChunkPlan

_SLOWDOWN = 1.25

Replan = Callable[[ChunkPlan, frozenset[str]], ChunkPlan]


def spend(
    joint: JointGraph, plans: Sequence[ChunkPlan], free_overhead: float, replan: Replan
) -> list[ChunkPlan]:
    """Plans that keep fewer of their matmuls' results, the most bytes a flop dropped first.

    Args:
        free_overhead: extra time allowed, a fraction of the step.
        replan: a region's plan anew, given the matmuls that its backward may redo.
    """
    left = free_overhead * total_flops(joint.nodes)
    candidates = [
        (plan, joint.by_name[name])
        for plan in plans
        if plan.mode == SAVE
        for name in plan.saved
        if ops.is_matmul(joint.by_name[name])
    ]
    candidates.sort(key=lambda pair: -nbytes(pair[1]) / max(1, flops(pair[1])))
    repeat: dict[int, set[str]] = {}
    for plan, node in candidates:
        if _SLOWDOWN * flops(node) <= left:
            left -= _SLOWDOWN * flops(node)
            repeat.setdefault(id(plan), set()).add(node.name)
    return [
        replan(plan, frozenset(repeat[id(plan)])) if id(plan) in repeat else plan for plan in plans
    ]
