"""The cost of a node: floating point operations, and an estimate of its time on the device.

    time of a matmul or attention  =  operations / measured rate  +  bytes moved / bandwidth
    time of any other op           =  bytes of the result / bandwidth

Inductor fuses pointwise ops, so their operands are not counted as read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from mstpass.graph import ops
from mstpass.graph.device_costs import costs_of
from mstpass.graph.joint import nbytes, tensors_of, value_of
from mstpass.graph.sizes import hint_shape

_BYTES_PER_US = {"cpu": 1e4}  # 10 GB/s: one kernel on two cores
_BYTES_PER_US_ELSEWHERE = 2e6  # 2 TB/s: a large GPU


def time_us(node: fx.Node) -> float:
    """The estimated time of one node in microseconds; 0 for views and nodes without a tensor."""
    device = next((v.device for v in tensors_of(node.meta.get("val"))), None)
    if node.op != "call_function" or ops.is_view(node) or device is None:
        return 0.0
    bandwidth = _BYTES_PER_US.get(device.type, _BYTES_PER_US_ELSEWHERE)
    operations = flops(node)
    if not operations:
        return nbytes(node) / bandwidth
    moved = nbytes(node) + sum(map(nbytes, node.all_input_nodes))
    return operations / costs_of(device).flops_per_us + moved / bandwidth


def flops(node: fx.Node) -> int:
    """The floating point operations of one node; 0 for all ops but matmuls and attention.

    Symbolic sizes count with their hint (sizes.py).
    """
    if ops.is_matmul(node):
        out, left = value_of(node), value_of(ops.matmul_factors(node)[0])
        if out is None or left is None:
            return 0
        return 2 * math.prod(hint_shape(out)) * hint_shape(left)[-1]
    if "scaled_dot_product" in ops.op_name(node):
        return _attention_flops(node)
    return 0


def _attention_flops(node: fx.Node) -> int:
    """Two matmuls in the forward, five in the backward, each ``[S, D] @ [D, S]`` for every head."""
    backward = "backward" in ops.op_name(node)
    tensors = [v for v in map(value_of, node.all_input_nodes) if v is not None and v.dim() == 4]
    query, key = tensors[backward : backward + 2] if len(tensors) > 2 else (None, None)
    if query is None or key is None:
        return 0
    batch, heads, rows, features = hint_shape(query)
    return (5 if backward else 2) * 2 * batch * heads * rows * hint_shape(key)[2] * features


def total_flops(nodes: Iterable[fx.Node]) -> int:
    return sum(map(flops, nodes))
