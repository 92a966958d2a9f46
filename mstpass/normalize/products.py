"""Products in other forms: those of convolutions, and those of experts.

A convolution whose kernel has one element becomes a matrix product over the channels::

    conv(x [B, d, *S], w [C, d, *1], b)  =  rows(x) [N, d] @ w^T [d, C] + b,     N = B S

The head of a segmentation, ``nn.Conv2d(d, classes, 1)``, is one, and so are the layers of an MLP
over pixels. Its gradients are products as well, with g = rows(gradient) [N, C]:

    dx = g @ w,     dw = g^T @ rows(x),     db = sum of g over its rows

Each is the same sum in another order. A convolution that widens no value, or that reads neighbours
(a larger kernel, a stride, padding, groups), stays what it is.

``made_in_vain``: what is not rewritten, because the products that would be made end in no loop.

Two rewrites make products: of chunks that a user has made (join_windows.py), and of convolutions.
The chunks may need less memory, and the convolution less time, than a product of all tokens in one
piece.

Products of experts are written so that a chunk of their rows can be computed by itself::

    aten._grouped_mm(x, w, ends)                          rows of each expert, times its weights
    transformers::grouped_mm_fallback(x, w, ends)         the same
    aten._grouped_mm(x^T, dy, ends)                       gradient of the weights
    transformers::grouped_mm_fallback_backward(x, w, ends, dy)     both gradients

become ``grouped_rows`` and ``grouped_sums`` of graph/grouped_products.py, which take the numbers of
the rows besides. A gradient of weights that are read transposed, as those of transformers are, is
the transpose of ``grouped_sums(dy^T, x)``: so it has the layout of the weights, and no copy of it
has to be made.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.grouped_products import grouped_rows, grouped_sums
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import expression, generic
from mstpass.graph.token_rules.arguments import argument, has_argument, shape_of
from mstpass.regions.anchors import WIDEN, anchors
from mstpass.torch_internals.graphs import OpOverload, schema_of

aten = torch.ops.aten


def convolutions_as_products(joint: JointGraph, kept: Container[str] = ()) -> Rewritten:
    """Rewrite them in a copy of the graph, with their gradients.

    Args:
        kept: the names of the bases of weights whose convolutions stay as they are.

    Returns:
        The copy and the names of the nodes made; the graph itself if no convolution widens.
    """
    weights = {w for w in weights_of_one_element(joint) if ops.base_of(w).name not in kept}
    written = (node for node in joint.nodes if node.target in _WRITERS)
    found = (n for n in written if argument(n, "weight") in weights and _has_one_element(n))
    return rewritten(joint, found, lambda copy, node: _WRITERS[node.target](copy, node))


def weights_of_one_element(joint: JointGraph) -> set[fx.Node]:
    """The weights of the convolutions that are products; empty if none of these widens."""
    found = {
        argument(node, "weight")
        for node in joint.nodes
        if node.target is aten.convolution.default and _has_one_element(node)
    }
    return found if any(map(_widens, found)) else set()


def _has_one_element(node: fx.Node) -> bool:
    """Whether each element of the result reads one place of the input, the one where it is."""
    value = value_of(argument(node, "weight"))
    return (
        value is not None
        and all(size == 1 for size in value.shape[2:])
        and all(step == 1 for step in argument(node, "stride"))
        and all(size == 0 for size in argument(node, "padding"))
        and argument(node, "groups") == 1
        and not argument(node, "transposed")
    )


def _widens(weight: fx.Node) -> bool:
    after, before = weight.meta["val"].shape[:2]
    return bool(generic(after) >= WIDEN * generic(before))


def _rows(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    """``[B, d, *S]`` as ``[N, d]``."""
    value, call = node.meta["val"], rewriting.builder.call
    last = call(aten.permute.default, node, [0, *range(2, value.dim()), 1])
    (channels,) = rewriting.sizes.arguments([value.shape[1]])
    return call(aten.reshape.default, last, [-1, channels])


def _from_rows(rewriting: Rewriting, rows: fx.Node, like: torch.Tensor) -> fx.Node:
    """``[N, C]`` in the shape ``[B, C, *S]`` of a value with the same places."""
    call, rank = rewriting.builder.call, like.dim()
    sizes = rewriting.sizes.arguments([like.shape[0], *like.shape[2:], rows.meta["val"].shape[1]])
    last = call(aten.view.default, rows, sizes)
    return call(aten.permute.default, last, [0, rank - 1, *range(1, rank - 1)])


def _matrix(rewriting: Rewriting, weight: fx.Node) -> fx.Node:
    return rewriting.builder.call(aten.view.default, weight, list(weight.meta["val"].shape[:2]))


def _product(rewriting: Rewriting, node: fx.Node) -> fx.Node:
    source, bias = argument(node, "input"), argument(node, "bias")
    call = rewriting.builder.call
    columns = call(aten.permute.default, _matrix(rewriting, argument(node, "weight")), [1, 0])
    factors = _rows(rewriting, source), columns
    product = (
        call(aten.mm.default, *factors)
        if bias is None
        else call(aten.addmm.default, bias, *factors)
    )
    return _from_rows(rewriting, product, source.meta["val"])


def _gradients(rewriting: Rewriting, node: fx.Node) -> None:
    source, weight = argument(node, "input"), argument(node, "weight")
    call, value = rewriting.builder.call, source.meta["val"]
    gradient = _rows(rewriting, argument(node, "grad_output"))
    rows = call(aten.mm.default, gradient, _matrix(rewriting, weight))
    columns = call(aten.permute.default, gradient, [1, 0])
    matrix = call(aten.mm.default, columns, _rows(rewriting, source))
    of_input = _from_rows(rewriting, rows, value)
    of_weight = call(aten.view.default, matrix, list(weight.meta["val"].shape))
    of_bias = call(aten.sum.dim_IntList, gradient, [0])
    rewriting.replace_items(node, (of_input, of_weight, of_bias))


_WRITERS: dict[Any, Any] = {
    aten.convolution.default: _product,
    aten.convolution_backward.default: _gradients,
}


# ---- what is not rewritten -----------------------------------------------------------------------
def made_in_vain(
    joint: JointGraph, prepared: JointGraph, members: Container[str]
) -> frozenset[str]:
    """The bases of what is multiplied in products that rewrites have made, and in no region.

    Args:
        joint: the graph before the rewrites.
        prepared: the one after them.
        members: the names of the nodes of its regions.
    """
    of_members = (n for n in prepared.nodes if n.name in members and n not in prepared.backward)
    used = (bases_of(node) for node in of_members if ops.is_matmul(node))
    made = (bases_of(n) for n, _ in prepared.cached(anchors) if n.name not in joint.by_name)
    return frozenset(bases_of_convolutions(joint).union(*made).difference(*used))


def bases_of_convolutions(joint: JointGraph) -> set[str]:
    """The names of what the weights of convolutions that are products are views of."""
    return {ops.base_of(weight).name for weight in weights_of_one_element(joint)}


def bases_of(product: fx.Node) -> set[str]:
    """The names of what the factors of a product are views of: weights among them."""
    return {ops.base_of(factor).name for factor in ops.matmul_factors(product)}


# ---- products of experts -------------------------------------------------------------------------
prims = torch.ops.prims

_NATIVE = "aten::_grouped_mm"
_FALLBACK = "transformers::grouped_mm_fallback"
_FALLBACK_BACKWARD = "transformers::grouped_mm_fallback_backward"


def grouped_by_chunk(joint: JointGraph) -> Rewritten:
    """Rewrite the products of experts, in a copy of the graph.

    Returns:
        The copy and the names of the new products in it; the graph itself if it has none.
    """
    known: _Positions = {}
    write = lambda copy, node: _of_experts(copy, node, known)
    return rewritten(joint, filter(_is_grouped, joint.nodes), write)


def _is_grouped(node: fx.Node) -> bool:
    name = _name(node)
    if name != _NATIVE:
        return name in (_FALLBACK, _FALLBACK_BACKWARD)
    left, right, out = (value_of(n) for n in (*node.all_input_nodes[:2], node))
    if left is None or right is None or out is None:
        return False
    options = ("bias", "out_dtype")
    plain = not any(has_argument(node, o) and argument(node, o) is not None for o in options)
    has_ends = isinstance(argument(node, "offs"), fx.Node)
    return plain and has_ends and left.dim() == 2 and left.dtype == right.dtype == out.dtype


def _is_transposed(gradient: fx.Node) -> bool:
    """Whether the last dim but one of a batch of matrices is the one without gaps."""
    *_, outer, inner = gradient.meta["val"].stride()
    return bool(outer == 1 and inner != 1)


def _name(node: fx.Node) -> str:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    return schema_of(node.target).name


_Positions = dict[tuple[object, torch.device], fx.Node]  # numbers of rows, by their count


def _of_experts(rewriting: Rewriting, node: fx.Node, known: _Positions) -> fx.Node | None:
    """What takes the place of a product, or of a backward, whose results are replaced."""
    call = rewriting.builder.call

    def rows(left: fx.Node, weights: fx.Node) -> fx.Node:
        return call(grouped_rows, left, weights, _positions_of(rewriting, left, known), ends)

    def sums(left: fx.Node, right: fx.Node) -> fx.Node:
        positions, dtype = _positions_of(rewriting, right, known), right.meta["val"].dtype
        return call(grouped_sums, left, right, positions, ends, dtype)

    left, right, ends, *upstream = node.all_input_nodes
    if _name(node) != _FALLBACK_BACKWARD:
        return (rows if len(shape_of(right)) == 3 else sums)(left, right)
    (gradient,) = upstream
    of_rows = rows(gradient, call(aten.permute.default, right, [0, 2, 1]))
    weight = next((item for item in node.users if item.args[1] == 1), None)
    is_transposed = weight is not None and _is_transposed(weight)
    factors = (gradient, left) if is_transposed else (left, gradient)
    of_weights = sums(call(aten.permute.default, factors[0], [1, 0]), factors[1])
    if is_transposed:
        of_weights = call(aten.permute.default, of_weights, [0, 2, 1])
    rewriting.replace_items(node, (of_rows, of_weights))
    return None


def _positions_of(rewriting: Rewriting, rows: fx.Node, known: _Positions) -> fx.Node:
    """The numbers of the rows; one node for all values of as many rows."""
    value = rows.meta["val"]
    size = value.shape[0]
    key = expression(size), value.device
    if key not in known:
        call = rewriting.builder.call
        given = size if isinstance(size, int) else call(aten.sym_size.int, rows, 0)
        kinds = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
        known[key] = call(prims.iota.default, given, start=0, step=1, **kinds)
    return known[key]
