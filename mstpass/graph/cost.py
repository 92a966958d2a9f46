"""What nodes cost: floating point operations of matmuls and attention, and time on a device.

Time is what the floating point operations take at the device's measured rate, and what the bytes
take that a kernel moves. Inductor fuses pointwise ops: each counts with its result alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from mstpass.graph import op_table
from mstpass.graph.device_costs import costs_of
from mstpass.graph.joint import nbytes, tensors_of, value_of
from mstpass.graph.sizes import hint_shape

_BYTES_PER_US = {"cpu": 1e4}  # one kernel's; 10 GB/s on two cores
_BYTES_PER_US_ELSEWHERE = 2e6  # memory of a large GPU


def time_us(node: fx.Node) -> float:
    """Of one node, in microseconds, an estimate; 0 for views and what has no tensor."""
    device = next((v.device for v in tensors_of(node.meta.get("val"))), None)
    if node.op != "call_function" or op_table.is_view(node) or device is None:
        return 0.0
    rate = _BYTES_PER_US.get(device.type, _BYTES_PER_US_ELSEWHERE)
    work = flops(node)
    if not work:
        return nbytes(node) / rate
    moved = nbytes(node) + sum(map(nbytes, node.all_input_nodes))
    return work / costs_of(device).flops_per_us + moved / rate


def flops(node: fx.Node) -> int:
    """Of one node; 0 for all but matmuls and attention. Symbolic sizes count with their hint."""
    if op_table.is_matmul(node):
        out, left = value_of(node), value_of(op_table.matmul_factors(node)[0])
        if out is None or left is None:
            return 0
        return 2 * math.prod(hint_shape(out)) * hint_shape(left)[-1]
    if "scaled_dot_product" in op_table.name_of(node):
        return _attention_flops(node)
    return 0


def _attention_flops(node: fx.Node) -> int:
    """Two products forward, five backward, each tokens x tokens x features a head."""
    backward = "backward" in op_table.name_of(node)
    tensors = [v for v in map(value_of, node.all_input_nodes) if v is not None and v.dim() == 4]
    query, key = tensors[backward : backward + 2] if len(tensors) > 2 else (None, None)
    if query is None or key is None:
        return 0
    batch, heads, rows, features = hint_shape(query)
    return (5 if backward else 2) * 2 * batch * heads * rows * hint_shape(key)[2] * features


def total_flops(nodes: Iterable[fx.Node]) -> int:
    return sum(map(flops, nodes))
