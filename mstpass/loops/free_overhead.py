"""Spend the free plan's extra time where it frees the most memory: on matmul results of MLPs.

A region in save mode keeps the results of its forward matmuls for backward. Each of them that its
backward loop computes again instead costs time, and saves the bytes of the result. The extra time
of a matmul is estimated as its share of the step's floating point operations, times ``_SLOWDOWN``.
Matmuls are taken by bytes saved for each operation, the best first, while the time allows it: all
those of a region together or, if no region can be taken as a whole, single ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mstpass.graph import ops
from mstpass.graph.checkpoint_policies import tag_of
from mstpass.graph.joint import JointGraph, nbytes
from mstpass.graph.node_cost import total_flops
from mstpass.plans import ChunkPlan
from mstpass.problem.problem import MUST_SAVE, SAVE

_SLOWDOWN = 1.25  # of a recomputed matmul: memory traffic, and products of few rows


def matmuls_to_recompute(
    joint: JointGraph, plans: Sequence[ChunkPlan], free_overhead: float
) -> list[frozenset[str]]:
    """For each plan the names of the saved matmul results that backward may compute again.

    Args:
        free_overhead: the extra time allowed, as a fraction of the step's.
    """
    left = free_overhead * total_flops(joint.nodes)
    chosen = [frozenset[str]()] * len(plans)
    whole = [(i, _saved_matmuls(joint, p)) for i, p in enumerate(plans) if p.mode == SAVE]
    single = [(i, [node]) for i, nodes in whole for node in nodes]
    for candidates in (whole, single):
        # Regions that save nothing have the same loops, and share their code. A region that saves
        # a part has loops of its own to compile, so it comes only if no region fits as a whole.
        if any(chosen):
            break
        for i, nodes in sorted(candidates, key=lambda pair: -_bytes_per_flop(pair[1])):
            cost = _SLOWDOWN * total_flops(nodes)
            if nodes and cost <= left:
                left -= cost
                chosen[i] |= {n.name for n in nodes}
    return chosen


def _saved_matmuls(joint: JointGraph, plan: ChunkPlan) -> list[fx.Node]:
    """The saved matmul results, but for those that the user's checkpointing saves."""
    saved = map(joint.by_name.__getitem__, plan.saved)
    return [n for n in saved if ops.is_matmul(n) and tag_of(n) != MUST_SAVE]


def _bytes_per_flop(nodes: Sequence[fx.Node]) -> float:
    return sum(map(nbytes, nodes)) / max(1, total_flops(nodes))
