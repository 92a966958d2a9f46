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

Regions grow from the results of one of the fused ops, or of attention written out in products::

    scores = q @ k.transpose()          [B * heads, N, M]
    weights = softmax(scores)           and masks, caps, sinks, casts in front of it or behind
    result = weights @ v                [B * heads, N, d]
"""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import NamedTuple

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import NEEDS_ALL, SEPARATE_DIMS
from mstpass.graph.attention import heads_dim, is_attention
from mstpass.graph.axes import HEADS
from mstpass.graph.heads import HeadAxis, HeadDim
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of, value_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.tokens import CannotTake
from mstpass.plans import Region, Rejection
from mstpass.regions.grow import found_regions
from mstpass.regions.head_growth import HeadGrowth, around
from mstpass.walk import walk_once

aten = torch.ops.aten
KIND = "attention"
_WRONG_TYPE = NEEDS_ALL("this torch says that the logarithms of float64 attention are float32")


def detect_attention(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[Region], list[Rejection]]:
    """The attention regions of the graph, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    known = set(taken)
    seeds = {seed.node: seed for seed in attention_seeds(joint)}
    before: HeadGrowth | None = None

    def region_of(node: fx.Node) -> Region:
        nonlocal before
        _check_types(node)
        before = growth = _best_growth(joint, seeds[node], known, before)
        region = region_of_heads(growth, node)
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


def _best_growth(
    joint: JointGraph, seed: Seed, taken: Set[fx.Node], before: HeadGrowth | None
) -> HeadGrowth:
    """The region of the best number of heads.

    Args:
        before: that of the attention before this one, whose number is best here too where the
            region is as large: layers are alike.

    Raises:
        CannotTake: there is none, whatever the number.
    """
    if before is not None and seed.num_heads % before.num_heads == 0:
        with contextlib.suppress(CannotTake):
            growth = _grown(joint, seed, before.num_heads, taken)
            if _size(growth) == _size(before):
                return growth
    growths, refusals = list[HeadGrowth](), list[CannotTake]()
    for num_heads in range(seed.num_heads, 1, -1):
        if seed.num_heads % num_heads == 0:
            try:
                growths.append(_grown(joint, seed, num_heads, taken))
            except CannotTake as refusal:
                refusals.append(refusal)
    if not growths:
        raise refusals[0]
    return min(growths, key=_crossing_bytes)


def _grown(joint: JointGraph, seed: Seed, num_heads: int, taken: Set[fx.Node]) -> HeadGrowth:
    """The region around a seed, in which ``num_heads`` heads are told apart.

    Raises:
        CannotTake: there is no such region.
    """
    held = HeadDim(seed.held.dim, seed.num_heads // num_heads)
    return around(
        seed.node, held, lambda left_out: HeadGrowth(joint, HeadAxis(num_heads), taken, left_out)
    )


def _size(growth: HeadGrowth) -> tuple[int, int]:
    return len(growth.specs), _crossing_bytes(growth)


def _crossing_bytes(growth: HeadGrowth) -> int:
    """Bytes of the computed values that cross the region's boundary."""
    computed = {node for node in growth.sliced if not ops.is_weight(node)}
    return sum(map(nbytes, computed | set(growth.leaving())))


def region_of_heads(growth: HeadGrowth, seed: fx.Node, axis: str = HEADS) -> Region:
    """What has grown, as plain data.

    Raises:
        CannotTake: a loop cannot take what crosses the boundary.
    """
    outputs = growth.leaving()
    _check_operands(growth, outputs)
    return Region(
        kind=KIND,
        source=source_of(seed),
        num_tokens=growth.num_heads,
        width=numel(seed) // growth.num_heads,
        fused=False,
        unit=None,
        axis=axis,
        **growth.plain(outputs),
    )


def _check_operands(growth: HeadGrowth, outputs: list[fx.Node]) -> None:
    """Check that a loop can take what crosses the region's boundary.

    Raises:
        CannotTake: it is not one tensor, or a member has a symbolic size.
    """
    for node in (*growth.sliced, *outputs):
        if value_of(node) is None:
            raise CannotTake(node, growth.barriers.get(node, SEPARATE_DIMS("it is not one tensor")))


# ---- seeds ---------------------------------------------------------------------------------------
class Seed(NamedTuple):
    """A value with heads: where it holds them, and their number."""

    node: fx.Node
    held: HeadDim
    num_heads: int


def attention_seeds(joint: JointGraph) -> list[Seed]:
    """The results of attention in the forward, in the graph's order."""
    found = []
    for node in joint.nodes:
        if node in joint.backward:
            continue
        held: tuple[fx.Node, int] | None = None
        if is_attention(node):
            held = node, heads_dim(node)
        elif node.target is aten.bmm.default and _reads_scores(node):
            held = _with_heads_apart(node)
        if held is not None:
            count = next(tensors_of(held[0].meta["val"])).shape[held[1]]
            if isinstance(count, int) and count > 1:
                found.append(Seed(held[0], HeadDim(held[1]), count))
    return found


def _reads_scores(product: fx.Node) -> bool:
    """Whether the left matrix is a softmax of another product, or computed so, row by row."""
    before = lambda node: node.all_input_nodes if _works_row_by_row(node) else ()
    reached = set(walk_once(ops.matmul_factors(product)[:1], before))
    softmax = {node for node in reached if node.target in (aten.exp.default, aten._softmax.default)}
    return bool(softmax) and any(map(ops.is_batched_matmul, reached))


def _works_row_by_row(node: fx.Node) -> bool:
    return ops.row(node).kind in ("view", "pointwise", "index")


def _with_heads_apart(product: fx.Node) -> tuple[fx.Node, int] | None:
    """The result as ``[B, heads, N, d]`` or ``[heads, N, d]``, and the dim of its heads."""
    for reader in product.users:
        value = value_of(reader)
        if ops.is_cheap_view(reader) and value is not None and value.dim() == 4:
            return reader, 1
    return product, 0
