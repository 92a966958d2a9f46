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
from mstpass.regions.head_growth import HeadGrowth
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
    seeds = attention_seeds(joint)
    before: HeadGrowth | None = None

    def region_of(node: fx.Node) -> Region:
        nonlocal before
        _check_types(node)
        before = growth = _best_growth(joint, node, seeds[node], known, before)
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
    joint: JointGraph, seed: fx.Node, dim: int, taken: Set[fx.Node], before: HeadGrowth | None
) -> HeadGrowth:
    """The region around a seed, in which the best number of heads are told apart.

    Args:
        dim: where the seed holds its heads.
        before: that of the attention before this one, whose number is best here too where the
            region is as large: layers are alike.

    Raises:
        CannotTake: there is none, whatever the number.
    """
    total = next(tensors_of(seed.meta["val"])).shape[dim]

    def grown(num_heads: int) -> HeadGrowth:
        held = HeadDim(dim, total // num_heads)
        return HeadGrowth.around(seed, held, joint, HeadAxis(num_heads), taken)

    if before is not None and total % before.num_heads == 0:
        with contextlib.suppress(CannotTake):
            growth = grown(before.num_heads)
            if _size(growth) == _size(before):
                return growth
    growths, refusals = list[HeadGrowth](), list[CannotTake]()
    for num_heads in range(total, 1, -1):
        if total % num_heads == 0:
            try:
                growths.append(grown(num_heads))
            except CannotTake as refusal:
                refusals.append(refusal)
    if not growths:
        raise refusals[0]
    return min(growths, key=_crossing_bytes)


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
    sizes = {"num_tokens": growth.num_heads, "width": numel(seed) // growth.num_heads}
    return growth.region(outputs, kind=KIND, source=source_of(seed), axis=axis, **sizes)


def _check_operands(growth: HeadGrowth, outputs: list[fx.Node]) -> None:
    """Check that a loop can take what crosses the region's boundary.

    Raises:
        CannotTake: it is not one tensor, or a member has a symbolic size.
    """
    for node in (*growth.sliced, *outputs):
        if value_of(node) is None:
            raise CannotTake(node, growth.barriers.get(node, SEPARATE_DIMS("it is not one tensor")))


# ---- seeds ---------------------------------------------------------------------------------------
def attention_seeds(joint: JointGraph) -> dict[fx.Node, int]:
    """The results of attention in the forward, in the graph's order, with the dims of heads."""
    found = {}
    for node in joint.nodes:
        if node in joint.backward:
            continue
        if is_attention(node):
            seed, dim = node, heads_dim(node)
        elif node.target is aten.bmm.default and _reads_scores(node):
            seed, dim = _with_heads_apart(node)
        else:
            continue
        count = next(tensors_of(seed.meta["val"])).shape[dim]
        if isinstance(count, int) and count > 1:
            found[seed] = dim
    return found


def _reads_scores(product: fx.Node) -> bool:
    """Whether the left matrix is a softmax of another product, or computed so, row by row."""
    before = lambda node: node.all_input_nodes if _works_row_by_row(node) else ()
    reached = set(walk_once(ops.matmul_factors(product)[:1], before))
    softmax = {node for node in reached if node.target in (aten.exp.default, aten._softmax.default)}
    return bool(softmax) and any(map(ops.is_batched_matmul, reached))


def _works_row_by_row(node: fx.Node) -> bool:
    return ops.row(node).kind in ("view", "pointwise", "index")


def _with_heads_apart(product: fx.Node) -> tuple[fx.Node, int]:
    """The result as ``[B, heads, N, d]`` or ``[heads, N, d]``, and the dim of its heads."""
    for reader in product.users:
        value = value_of(reader)
        if ops.is_cheap_view(reader) and value is not None and value.dim() == 4:
            return reader, 1
    return product, 0
