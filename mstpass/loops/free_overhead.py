"""Spend the free plan's extra time where it frees most: keep less of the MLPs.

A region that saves by choice can redo some of its matmuls in the backward loop instead of keeping
their results. The extra time of one is estimated as its share of the step's floating point
operations, times ``_SLOWDOWN`` for what it costs beyond them (memory traffic, short products).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from mstpass.graph import op_table
from mstpass.graph.checkpoint_tags import tag_of
from mstpass.graph.cost import total_flops
from mstpass.graph.joint import JointGraph, nbytes
from mstpass.plans import SAVE, ChunkPlan
from mstpass.problem.problem import MUST_SAVE

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
    chosen: dict[int, frozenset[str]] = {}
    whole = [(plan, _matmuls(joint, plan)) for plan in plans if plan.mode == SAVE]
    single = [(plan, [node]) for plan, nodes in whole for node in nodes]
    for candidates in (whole, single):
        # Regions that keep nothing are alike and share their loops' code; a region that keeps a
        # part has loops of its own to compile, so it only comes where no whole one fits.
        if chosen:
            break
        for plan, nodes in sorted(candidates, key=lambda pair: -_bytes_per_flop(pair[1])):
            cost = _SLOWDOWN * total_flops(nodes)
            if nodes and cost <= left:
                left -= cost
                chosen[id(plan)] = chosen.get(id(plan), frozenset()) | {n.name for n in nodes}
    return [replan(p, chosen[id(p)]) if id(p) in chosen else p for p in plans]


def _matmuls(joint: JointGraph, plan: ChunkPlan) -> list[fx.Node]:
    saved = map(joint.by_name.__getitem__, plan.saved)
    return [n for n in saved if op_table.is_matmul(n) and tag_of(n) != MUST_SAVE]


def _bytes_per_flop(nodes: Sequence[fx.Node]) -> float:
    return sum(map(nbytes, nodes)) / max(1, total_flops(nodes))
