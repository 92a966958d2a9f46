"""Write the products of experts so that a chunk of their rows can be computed by itself.

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

import torch
from torch import fx

from mstpass.graph.grouped_products import grouped_rows, grouped_sums
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.sizes import expression
from mstpass.graph.token_rules.arguments import argument, has_argument, shape_of
from mstpass.torch_internals.graphs import OpOverload, schema_of

aten = torch.ops.aten
prims = torch.ops.prims

_NATIVE = "aten::_grouped_mm"
_FALLBACK = "transformers::grouped_mm_fallback"
_FALLBACK_BACKWARD = "transformers::grouped_mm_fallback_backward"


def grouped_by_chunk(joint: JointGraph) -> Rewritten:
    """Rewrite the products of experts, in a copy of the graph.

    Returns:
        The copy and the names of the new products in it; the graph itself if it has none.
    """
    positions: dict[tuple[object, torch.device], fx.Node] = {}
    write = lambda copy, node: _Products(copy, positions).of(node)
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


class _Products:
    """Writes the products of one graph.

    Args:
        positions: the numbers of the rows that were written before.
    """

    def __init__(self, rewriting: Rewriting, positions: dict[tuple[object, torch.device], fx.Node]):
        self.rewriting, self.positions = rewriting, positions
        self.call = rewriting.builder.call

    def of(self, node: fx.Node) -> fx.Node | None:
        """What takes the place of a product, or of a backward, whose results are replaced."""
        left, right, ends, *upstream = node.all_input_nodes
        if _name(node) != _FALLBACK_BACKWARD:
            return (self._rows if len(shape_of(right)) == 3 else self._sums)(left, right, ends)
        (gradient,) = upstream
        swapped = self.call(aten.permute.default, right, [0, 2, 1])
        rows = self._rows(gradient, swapped, ends)
        weight = next((item for item in node.users if item.args[1] == 1), None)
        is_transposed = weight is not None and _is_transposed(weight)
        factors = (gradient, left) if is_transposed else (left, gradient)
        columns = self.call(aten.permute.default, factors[0], [1, 0])
        sums = self._sums(columns, factors[1], ends)
        if is_transposed:
            sums = self.call(aten.permute.default, sums, [0, 2, 1])
        self.rewriting.replace_items(node, (rows, sums))
        return None

    def _rows(self, rows: fx.Node, weights: fx.Node, ends: fx.Node) -> fx.Node:
        return self.call(grouped_rows, rows, weights, self._positions_of(rows), ends)

    def _sums(self, left: fx.Node, right: fx.Node, ends: fx.Node) -> fx.Node:
        dtype = right.meta["val"].dtype
        return self.call(grouped_sums, left, right, self._positions_of(right), ends, dtype)

    def _positions_of(self, rows: fx.Node) -> fx.Node:
        """The numbers of the rows; one node for all values of as many rows."""
        value = rows.meta["val"]
        size = value.shape[0]
        key = expression(size), value.device
        if key not in self.positions:
            given = size if isinstance(size, int) else self.call(aten.sym_size.int, rows, 0)
            kinds = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
            self.positions[key] = self.call(prims.iota.default, given, start=0, step=1, **kinds)
        return self.positions[key]
