"""What a convolution computes, as a matrix product of the same size.

The product has a row for each place of the result, and contracts the input channels of a group
times the elements of the kernel. The backward runs a product of that size for the gradient of the
input and one for that of the weight.
"""

from __future__ import annotations

import math

from torch import fx

from mstpass.graph.joint import value_of
from mstpass.graph.products import Product
from mstpass.graph.sizes import hint_shape
from mstpass.graph.token_rules.arguments import argument
from mstpass.torch_internals.graphs import name_of

_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


def convolution_work(node: fx.Node) -> Product | None:
    """The product of a convolution or of its gradients, one for each; None for all other nodes."""
    name = name_of(node.target) if node.op == "call_function" else ""
    if name not in (_FORWARD, _BACKWARD):
        return None
    count = 1 if name == _FORWARD else sum(argument(node, "output_mask")[:2])
    of_result = node if name == _FORWARD else argument(node, "grad_output")
    source, result, weight = map(value_of, (argument(node, "input"), of_result, _weight(node)))
    if source is None or result is None or weight is None or not count:
        return None
    transposed = bool(argument(node, "transposed"))
    batch, columns, *places = hint_shape(source if transposed else result)
    _, *contracted = hint_shape(weight)
    return Product(
        rows=batch * math.prod(places),
        contracted=math.prod(contracted),
        columns=columns,
        batch=count,
        dtype=source.dtype,
        result_bytes=source.element_size(),
    )


def _weight(node: fx.Node) -> fx.Node:
    weight = argument(node, "weight")
    assert isinstance(weight, fx.Node), "the weight is a node"
    return weight
