"""The cost of a node: floating point operations, and an estimate of its time on the device.

The costs of the device (device_costs.py) turn three kinds of nodes into a time: products, attention
and all others.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mstpass.graph import ops
from mstpass.graph.collectives import is_wait
from mstpass.graph.device_costs import costs_of
from mstpass.graph.flex_attention import FLEX
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.products import product_of
from mstpass.graph.sizes import hint_shape
from mstpass.graph.traffic import moved_bytes


def time_us(joint: JointGraph, node: fx.Node) -> float:
    """The estimated time of one node in microseconds.

    0 for views, for waits, and for nodes without a tensor.
    """
    device = next((v.device for v in tensors_of(node.meta.get("val"))), None)
    if node.op != "call_function" or ops.is_view(node) or is_wait(node) or device is None:
        return 0.0
    costs = costs_of(device)
    product = product_of(node)
    if product is not None:
        return costs.product_us(product)
    moved = moved_bytes(joint, node)
    operations = _attention_flops(node)
    if operations:
        query = next(v for v in map(value_of, node.all_input_nodes) if v is not None)
        return costs.attention_us(operations, query.dtype, moved)
    return costs.other_us(nbytes(node), moved)


def flops(node: fx.Node) -> int:
    """The floating point operations of one node; 0 for all ops but matmuls and attention.

    Symbolic sizes count with their hint (sizes.py).
    """
    product = product_of(node)
    return _attention_flops(node) if product is None else product.operations


def _attention_flops(node: fx.Node) -> int:
    """Two matmuls in the forward, five in the backward, each ``[S, D] @ [D, S]`` for every head."""
    if "scaled_dot_product" not in ops.op_name(node) and node.target not in FLEX:
        return 0
    backward = "backward" in ops.op_name(node)
    tensors = [v for v in map(value_of, node.all_input_nodes) if v is not None and v.dim() == 4]
    first = int(backward and node.target not in FLEX)  # behind the gradient of the output
    query, key = tensors[first : first + 2] if len(tensors) > 2 else (None, None)
    if query is None or key is None:
        return 0
    batch, heads, rows, features = hint_shape(query)
    return (5 if backward else 2) * 2 * batch * heads * rows * hint_shape(key)[2] * features


def total_flops(nodes: Iterable[fx.Node]) -> int:
    return sum(map(flops, nodes))
