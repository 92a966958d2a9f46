"""Find attention that can run in loops, over groups of heads or over rows of queries.

**Heads.** A region of heads grows from each attention product of the forward (head_growth.py). It
is described by the same ``Region`` as a region of tokens, with ``axis="heads"``:

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

**Rows of queries**, where the mask is large and computed. A mask of S x T scores has a value for
each query and each key, and exists in full where a kernel reads it: in 16 bits 512 MiB for 16,384
tokens. It is computed from little: padding, documents, blocks, a window. A loop over rows of
queries computes the rows that its chunk needs (graph/attention.py), and the backward's loop
computes them again.

The members of such a region are the attention, forward and backward, and the large values that its
mask is computed from. Several attentions read one mask, and each of their loops computes its rows
itself. Where another op reads the mask too, it still exists.

``whole_masks`` names the masks that attention reads whole, with what they take and what to change.
A kernel of attention takes a mask as one value of queries x keys, in the type of the queries. Heads
and layers share it, and the backward computes it again instead of keeping it, but while a kernel
runs it exists in full.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Set

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import HEADS_APART, NEEDS_ALL, NO_MASK, NO_MASK_OR_BUDGET, SEPARATE_DIMS
from mstpass.graph.attention import (
    OTHER_RESULT,
    ROWS,
    backwards_of,
    heads_dim,
    is_attention,
    is_backward,
    mask_of,
)
from mstpass.graph.axes import HEADS, QUERIES, QUERY_AXIS
from mstpass.graph.heads import HeadAxis, HeadDim
from mstpass.graph.joint import JointGraph, nbytes, numel, tensors_of, value_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import is_static
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import CannotTake, Refusal, Spec
from mstpass.plans import Region, Rejection
from mstpass.regions.grow import ANOTHER, Growth, found_regions
from mstpass.regions.head_growth import HeadGrowth
from mstpass.walk import walk_once

aten = torch.ops.aten
KIND = "attention"
NOT_BY_ROW = NO_MASK("is no tensor of fixed sizes with a row for each query")
AN_INPUT = NO_MASK("the mask, or a part of it as large, is an input of the graph")
PADDED = NO_MASK("attention's kernel pads its rows")
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


# ---- rows of queries, with the mask that each chunk needs ----------------------------------------
def detect_masked_attention(
    joint: JointGraph, taken: Set[fx.Node] = frozenset()
) -> tuple[list[Region], list[Rejection]]:
    """The regions of queries of the graph, and what was refused. Changes nothing.

    Args:
        taken: members of other regions.
    """
    seeds = (
        node
        for node in joint.nodes
        if not (node in joint.backward or node in taken or mask_of(node) is None)
        and not is_backward(node)
    )
    return found_regions(seeds, lambda node: _region_of_queries(joint, node, taken))


def _region_of_queries(joint: JointGraph, attention: fx.Node, taken: Set[fx.Node]) -> Region:
    query = argument(attention, "query").meta["val"]
    growth, masks = Growth(joint, QUERY_AXIS), _Masks(joint, QUERY_AXIS)
    for node in (attention, *backwards_of(attention)):
        growth.specs[node] = (ROWS,)
        mask, needs = mask_of(node), growth.required_specs(node)
        assert mask is not None, "attention has a mask"
        masks.add_mask(mask, needs[mask])  # its sizes are fixed, so the queries are
        for item in node.users:
            of_item = growth.spec_of_user(item, node)
            if isinstance(of_item, Refusal):
                raise CannotTake(node, OTHER_RESULT)
            value = value_of(item)
            if of_item == (ROWS,) and (value is None or value.shape[ROWS] != query.shape[ROWS]):
                raise CannotTake(item, PADDED)
            growth.specs[item] = of_item
    if not taken.isdisjoint(growth.specs):
        raise CannotTake(attention, ANOTHER)
    outputs, queries = growth.leaving(), int(query.shape[ROWS])
    growth.specs |= masks.specs
    width, source = min(map(numel, masks.specs)) // queries, source_of(attention)
    sizes = {"num_tokens": queries, "width": width}
    return growth.region(outputs, kind=KIND, source=source, axis=QUERIES, **sizes)


class _Masks(Growth):
    """The large values that masks are computed from, with their rows."""

    of_two_specs = HEADS_APART("is read along several dims")
    large = 0

    def add_mask(self, mask: fx.Node, spec: Spec) -> None:
        """Add the mask of an attention.

        Raises:
            CannotTake: a large value is not computed row by row.
        """
        if not spec or not is_static(mask.meta["val"]):
            raise CannotTake(mask, NOT_BY_ROW)
        self.large = math.prod(mask.meta["val"].shape[-2:])
        self._pull(mask, spec)
        self.add(mask, spec)

    def _pull(self, operand: fx.Node, spec: Spec) -> None:
        if value_of(operand) is None or numel(operand) < self.large or ops.is_constant(operand):
            return
        if not spec:
            raise CannotTake(operand, NOT_BY_ROW)
        if operand.op != "call_function":
            raise CannotTake(operand, AN_INPUT)
        self._put(operand, spec)

    def _pushes(self, member: fx.Node) -> bool:
        return False


# ---- masks that attention reads whole ------------------------------------------------------------
WHOLE_MASK = "attention reads this mask whole"


def whole_masks(joint: JointGraph, written: Collection[str]) -> Iterator[Rejection]:
    """One entry for each mask that an attention of the graph reads, if it is written in full.

    Args:
        written: names of the nodes that are left outside of loops.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in joint.nodes:
        mask = mask_of(node)
        if mask is not None:
            found.setdefault(ops.base_of(mask), node)
    for base, reader in found.items():
        value = value_of(base)
        if base.name in written and value is not None and value.dim() > 1:
            kind = str(value.dtype).removeprefix("torch.")
            reason = f"{WHOLE_MASK}, {' x '.join(map(str, value.shape))} in {kind}"
            yield Rejection(
                "apply", base.name, NO_MASK_OR_BUDGET(reason), source_of(reader), nbytes(base)
            )
