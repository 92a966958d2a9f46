"""The cost of a node: floating point operations, and an estimate of its time on the device.

The costs of the device (device_costs.py) turn four kinds of nodes into a time: products, attention,
collectives and all others.

A convolution counts as a matrix product of its size. That has a row for each place of the result,
and contracts the input channels of a group times the elements of the kernel. The backward runs a
product of that size for the gradient of the input and one for that of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from mstpass.graph import ops
from mstpass.graph.call_work import attention_work, computed_bytes, exchange_work, moved_bytes
from mstpass.graph.collectives import is_wait
from mstpass.graph.device_costs import costs_of
from mstpass.graph.joint import JointGraph, tensors_of, value_of
from mstpass.graph.loop_work import Product, product_of
from mstpass.graph.sizes import hint_shape
from mstpass.graph.token_rules.arguments import argument
from mstpass.torch_internals.graphs import name_of


def time_us(joint: JointGraph, node: fx.Node) -> float:
    """The estimated time of one node in microseconds.

    0 for views, for waits, and for nodes without a tensor.
    """
    device = next((v.device for v in tensors_of(node.meta.get("val"))), None)
    if node.op != "call_function" or ops.is_view(node) or is_wait(node) or device is None:
        return 0.0
    costs = costs_of(device)
    product = product_of(node) or convolution_work(node)
    if product is not None:
        return costs.product_us(product)
    moved = moved_bytes(joint, node)
    exchange = exchange_work(node)
    if exchange is not None:
        return costs.exchange_us(exchange)
    attention = attention_work(node)
    if attention is not None:
        return costs.attention_us(attention, moved)
    return costs.other_us(computed_bytes(node), moved)


def flops(node: fx.Node) -> int:
    """The floating point operations of one node; 0 for all ops but products, convolutions and
    attention.

    Symbolic sizes count with their hint (sizes.py).
    """
    work = product_of(node) or convolution_work(node) or attention_work(node)
    return 0 if work is None else work.operations


def total_flops(nodes: Iterable[fx.Node]) -> int:
    return sum(map(flops, nodes))


_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


def convolution_work(node: fx.Node) -> Product | None:
    """The product of a convolution or of its gradients, one for each; None for all other nodes."""
    name = name_of(node.target) if node.op == "call_function" else ""
    if name not in (_FORWARD, _BACKWARD):
        return None
    count = 1 if name == _FORWARD else sum(argument(node, "output_mask")[:2])
    of_result = node if name == _FORWARD else argument(node, "grad_output")
    operands = argument(node, "input"), of_result, argument(node, "weight")
    source, result, weight = map(value_of, operands)
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
