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
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import expression
from mstpass.graph.token_rules.arguments import argument, has_argument
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
    if not any(map(_is_grouped, joint.nodes)):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    products = _Products(rewriting)
    for node in rewriting.joint.nodes:
        if _is_grouped(node):
            products.replace(node)
    return rewriting.finished(), frozenset(products.made)


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
    """The products of one graph.

    Attributes:
        made: the names of the new ones.
    """

    def __init__(self, rewriting: Rewriting):
        self.rewriting, self.builder = rewriting, rewriting.builder
        self.made: list[str] = []
        self._positions: dict[tuple[object, torch.device], fx.Node] = {}

    def replace(self, node: fx.Node) -> None:
        left, right, ends = node.args[:3]
        if isinstance(argument(node, "offs"), fx.Node):
            ends = argument(node, "offs")
        assert (
            isinstance(left, fx.Node) and isinstance(right, fx.Node) and isinstance(ends, fx.Node)
        ), "the left, the right and ends are nodes"
        with self.builder.graph.inserting_before(node):
            if _name(node) == _FALLBACK_BACKWARD:
                upstream = node.args[3]
                assert isinstance(upstream, fx.Node), "the upstream is a node"
                swapped = self._call(aten.permute.default, right, [0, 2, 1], like=node)
                rows = self._rows(upstream, swapped, ends, node)
                gradient = next((item for item in node.users if item.args[1] == 1), None)
                if gradient is not None and _is_transposed(gradient):
                    sums = self._transposed_sums(left, upstream, ends, node)
                else:
                    columns = self._call(aten.permute.default, left, [1, 0], like=node)
                    sums = self._sums(columns, upstream, ends, node)
                self._replace_items(node, (rows, sums))
                return
            weights = value_of(right)
            assert weights is not None, "the weights are known"
            new = (self._rows if weights.dim() == 3 else self._sums)(left, right, ends, node)
        self.rewriting.replace(node, new)

    def _rows(self, rows: fx.Node, weights: fx.Node, ends: fx.Node, like: fx.Node) -> fx.Node:
        positions = self._positions_of(rows)
        return self._made(self._call(grouped_rows, rows, weights, positions, ends, like=like))

    def _sums(self, left: fx.Node, right: fx.Node, ends: fx.Node, like: fx.Node) -> fx.Node:
        dtype = right.meta["val"].dtype
        positions = self._positions_of(right)
        return self._made(self._call(grouped_sums, left, right, positions, ends, dtype, like=like))

    def _transposed_sums(
        self, rows: fx.Node, upstream: fx.Node, ends: fx.Node, like: fx.Node
    ) -> fx.Node:
        columns = self._call(aten.permute.default, upstream, [1, 0], like=like)
        sums = self._sums(columns, rows, ends, like)
        return self._call(aten.permute.default, sums, [0, 2, 1], like=like)

    def _replace_items(self, node: fx.Node, values: tuple[fx.Node, ...]) -> None:
        for item in list(node.users):
            self.rewriting.replace(item, values[item.args[1]])  # type: ignore[index]

    def _positions_of(self, rows: fx.Node) -> fx.Node:
        """The numbers of the rows; one node for all values of as many rows."""
        value = rows.meta["val"]
        size = value.shape[0]
        key = expression(size), value.device
        if key not in self._positions:
            given = size if isinstance(size, int) else self.builder.call(aten.sym_size.int, rows, 0)
            kinds = {"dtype": torch.int64, "device": value.device, "requires_grad": False}
            found = self.builder.call(prims.iota.default, given, start=0, step=1, **kinds)
            self._positions[key] = found
        return self._positions[key]

    def _call(self, target: OpOverload, *args: object, like: fx.Node) -> fx.Node:
        node = self.builder.call(target, *args)
        node.meta.update(replacement_meta(like))
        return node

    def _made(self, node: fx.Node) -> fx.Node:
        self.made.append(node.name)
        return node
