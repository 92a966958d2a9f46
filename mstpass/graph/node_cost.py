"""The cost of a node: floating point operations, and an estimate of its time on the device.

The costs of the device (device_costs.py) turn four kinds of nodes into a time: products, attention,
collectives and all others. A convolution counts as a product of its size.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention_work import attention_work
from mstpass.graph.collectives import is_wait
from mstpass.graph.convolution_work import convolution_work
from mstpass.graph.device_costs import costs_of
from mstpass.graph.exchange_work import exchange_work
from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.graph.products import product_of
from mstpass.graph.traffic import computed_bytes, moved_bytes


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
