"""Find attention that can run in loops over groups of heads.

A region of heads grows from each attention product of the forward (head_growth.py). It is described
by the same ``Region`` as a region of tokens, with ``axis="heads"``:

    sliced over heads     the weights of the projections, and what could not join
    whole                 the input of the projections, the rotary embedding's factors, masks
    summed over heads     the output projection's result, the gradient of the input
    stacked over heads    the gradients of the weights

The number of heads is that of the groups that can be told apart. Of the divisors of the number of
query heads, it is the one with which the fewest bytes of activations cross the region's boundary;
if several are equal in that, the largest. With grouped queries that is the number of key-value
heads.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention
from mstpass.graph.axes import HEADS
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of, value_of
from mstpass.graph.source_location import source_of
from mstpass.graph.tokens import CannotTake
from mstpass.plans import Region, Rejection
from mstpass.regions.attention_seeds import Seed, attention_seeds
from mstpass.regions.grow import found_regions
from mstpass.regions.head_growth import HeadGrowth, grow

KIND = "attention"
_WRONG_TYPE = "this torch says that the logarithms of float64 attention are float32"


def detect_attention(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[Region], list[Rejection]]:
    """The attention regions of the graph, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    known = set(taken)
    seeds = {seed.node: seed for seed in attention_seeds(joint)}

    def region_of(node: fx.Node) -> Region:
        _check_types(node)
        growth = _best_growth(joint, seeds[node], known)
        region = _region(growth, node)
        known.update(member for member in growth.specs if not ops.is_constant(member))
        return region

    return found_regions((node for node in seeds if node not in known), region_of)


def _check_types(attention: fx.Node) -> None:
    """Check that the results have the types that torch says: an old one says float32 on the CPU.

    Raises:
        CannotTake: they have not, so that a loop's buffer would have another type than its rows.
    """
    results = list(tensors_of(attention.meta["val"]))
    on_cpu = is_attention(attention) and results[0].device.type == "cpu"
    if on_cpu and results[0].dtype == torch.float64 != results[1].dtype:
        raise CannotTake(attention, _WRONG_TYPE)


def _best_growth(joint: JointGraph, seed: Seed, taken: Set[fx.Node]) -> HeadGrowth:
    """The region of the best number of heads.

    Raises:
        CannotTake: there is none, whatever the number.
    """
    best: HeadGrowth | None = None
    first_refusal: CannotTake | None = None
    for num_heads in range(seed.num_heads, 1, -1):
        if seed.num_heads % num_heads:
            continue
        try:
            growth = grow(joint, seed, num_heads, taken)
        except CannotTake as refusal:
            first_refusal = first_refusal or refusal
            continue
        if best is None or _crossing_bytes(growth) < _crossing_bytes(best):
            best = growth
    if best is None:
        raise first_refusal or CannotTake(seed.node, "has a single head")
    return best


def _crossing_bytes(growth: HeadGrowth) -> int:
    """Bytes of the computed values that cross the region's boundary."""
    computed = {node for node in growth.sliced if not ops.is_weight(node)}
    return sum(map(nbytes, computed | set(growth.leaving())))


def _region(growth: HeadGrowth, seed: fx.Node) -> Region:
    outputs = growth.leaving()
    _check_operands(growth, outputs)
    return Region(
        kind=KIND,
        source=source_of(seed),
        num_tokens=growth.num_heads,
        width=numel(seed) // growth.num_heads,
        fused=False,
        unit=None,
        axis=HEADS,
        **growth.plain(outputs),
    )


def _check_operands(growth: HeadGrowth, outputs: list[fx.Node]) -> None:
    """Check that a loop can take what crosses the region's boundary.

    Raises:
        CannotTake: it is not one tensor, or a member has a symbolic size.
    """
    for node in (*growth.sliced, *outputs):
        if value_of(node) is None:
            raise CannotTake(node, growth.barriers.get(node, "it is not one tensor"))
