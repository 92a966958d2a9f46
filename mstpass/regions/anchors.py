"""Anchors: the matmuls that widen, from which regions grow.

An anchor is a matmul in the forward of tokens with a weight, whose result has at least ``WIDEN``
times as many features per token as its input: the up projection of an MLP, or an LM head. So is a
batch of matmuls of tokens with each other, if no other one reads their results: those of the
patches of each image, in a contrastive loss.
"""

from __future__ import annotations

import math

from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import STATIC_SIZE
from mstpass.graph.joint import JointGraph, nbytes, numel, value_of
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import Size, generic, generic_shape, hint, is_static
from mstpass.graph.tokens import Refusal, Spec, token_count
from mstpass.plans import Rejection
from mstpass.walk import walk_once

WIDEN = 1.5
SYMBOLIC_WIDTH = STATIC_SIZE("a dim other than the token dims has a symbolic size")
# A value of a region is wide if it has at least these shares of the elements of its anchor's
# result and of its anchor's input.
WIDE_OF_ANCHOR = 0.4
_WIDE_OF_INPUT = 1.1
_SMALL_BYTES = 16 * 2**10


def anchors(joint: JointGraph) -> list[tuple[fx.Node, Spec]]:
    """The anchors of the graph with their specs, the one with the most bytes first."""
    found = []
    for node in joint.nodes:
        if not ops.is_matmul(node) or node in joint.backward:
            continue
        spec = anchor_spec(node) or _spec_of_pairs(joint, node)
        if spec is not None and not _is_small(node):
            found.append((node, spec))
    return sorted(found, key=lambda pair: (-nbytes(pair[0]), joint.index[pair[0]]))


def anchor_spec(node: fx.Node) -> Spec | None:
    """The token dims of a matmul's result if the matmul widens, else None."""
    sizes = widths(node)
    if sizes is None or generic(sizes[1]) < WIDEN * generic(sizes[0]):
        return None
    rank = node.meta["val"].dim()
    return (rank - 1,) if _is_transposed(node) else (rank - 2,)


def widths(node: fx.Node) -> tuple[Size, Size] | None:
    """The features per token before and after a matmul.

    None for a batch of matrices without weights: that is attention, not a layer of single tokens.
    """
    left, right = (value_of(n) for n in ops.matmul_factors(node))
    out = value_of(node)
    if left is None or right is None or out is None or not out.is_floating_point():
        return None
    if out.dim() == 3 and generic_shape(out)[0] != 1 and not _is_of_experts(node):
        return None
    return left.shape[-1], out.shape[-2 if _is_transposed(node) else -1]


def _spec_of_pairs(joint: JointGraph, node: fx.Node) -> Spec | None:
    """The token dims of a batch of products that compare tokens, as the patches of each image are.

    None if it is none, if it does not widen, or if another product of the forward reads what is
    made of its result: that is attention.
    """
    left, out = value_of(ops.matmul_factors(node)[0]), value_of(node)
    if left is None or out is None or out.dim() != 3 or not is_static(out):
        return None
    _, rows, columns = out.shape
    if rows < 2 or not isinstance(left.shape[-1], int) or columns < WIDEN * left.shape[-1]:
        return None
    readers = lambda n: [user for user in joint.users(n) if user not in joint.backward]
    wide = lambda n: [u for u in readers(n) if numel(u) >= WIDE_OF_ANCHOR * numel(node)]
    if any(ops.is_matmul(user) for n in walk_once([node], wide) for user in readers(n)):
        return None
    return (1,)


def _is_of_experts(node: fx.Node) -> bool:
    """Whether each matrix of a batch is multiplied by a weight of its own."""
    return any(map(ops.is_weight, ops.matmul_factors(node)))


def wide_numel(anchor: fx.Node, spec: Spec) -> int:
    """From how many elements on a value of the anchor's region is wide."""
    left, _ = ops.matmul_factors(anchor)
    shape = generic_shape(anchor.meta["val"])
    batch = 1 if 0 in spec else math.prod(shape[:-2])
    tokens = batch * token_count(shape, spec)
    input_width = generic_shape(left.meta["val"])[-1]
    return int(max(_WIDE_OF_INPUT * input_width * tokens, WIDE_OF_ANCHOR * numel(anchor)))


def weights_and_gradients(joint: JointGraph) -> set[fx.Node]:
    """Weights and their gradients, with what is computed from them alone, element by element.

    The gradient of a weight is a product of the backward of which no factor is a weight.
    """
    tokens = {ops.base_of(_token_factor(anchor)) for anchor, _ in joint.cached(anchors)}

    def is_weight(node: fx.Node) -> bool:
        return ops.is_weight(node) and ops.base_of(node) not in tokens

    found: set[fx.Node] = set()
    for node in joint.nodes:
        if is_weight(node):
            found.add(node)
        elif ops.is_matmul(node):
            if node in joint.backward and not any(map(is_weight, ops.matmul_factors(node))):
                found.add(node)
        elif ops.is_pointwise(node) or ops.is_view(node):
            operands = [n for n in node.all_input_nodes if value_of(n) is not None]
            if operands and found.issuperset(operands):
                found.add(node)
    return found


def _token_factor(anchor: fx.Node) -> fx.Node:
    left, right = ops.matmul_factors(anchor)
    return right if _is_transposed(anchor) else left


def _is_small(node: fx.Node) -> bool:
    """Whether the result is small in every batch; with a symbolic size it may grow."""
    value = value_of(node)
    return value is not None and is_static(value) and nbytes(node) < _SMALL_BYTES


def _is_transposed(node: fx.Node) -> bool:
    """Whether the matmul is a weight times tokens in columns."""
    left, right = ops.matmul_factors(node)
    return ops.is_weight(left) and not ops.is_weight(right)


# ---- wide products that are no anchors -----------------------------------------------------------
def refused_wide_products(joint: JointGraph) -> list[Rejection]:
    """Rejections of products that widen but from which no region can grow."""
    reasons = ((node, _why_refused(node)) for node in joint.nodes if node not in joint.backward)
    return [
        Rejection("detect", node.name, reason, source_of(node), nbytes(node))
        for node, reason in reasons
        if reason
    ]


def _why_refused(node: fx.Node) -> str:
    """Why no region grows from a product that widens; empty if one does, and of other nodes.

    Rows of a mixture of experts are grouped by expert; a symbolic width may be another one in the
    next batch.
    """
    if ops.is_grouped_matmul(node):
        row = ops.lookup(node)
        return row.reason if isinstance(row, Refusal) and _widens(node) else ""
    sizes = widths(node) if ops.is_matmul(node) and anchor_spec(node) is None else None
    if sizes is None or isinstance(sizes[0], int) or nbytes(node) < _SMALL_BYTES:
        return ""
    return SYMBOLIC_WIDTH if hint(sizes[1]) >= WIDEN * hint(sizes[0]) else ""


def _widens(node: fx.Node) -> bool:
    out, source = value_of(node), value_of(node.all_input_nodes[0])
    if out is None or source is None:
        return False
    return generic_shape(out)[-1] >= WIDEN * generic_shape(source)[-1]
