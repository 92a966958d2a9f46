"""Which scatters wait for their rows, under a budget (schedule/delay_embedding_gradient.py).

The schedule asks about the graph at hand, the simulation about a node of any graph of the step: a
plan and its graphs then have equal peaks, whatever is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import nbytes
from mstpass.graph.sizes import is_static

aten = torch.ops.aten

# Ops that add rows into zeros, and the position of the rows among their arguments.
_ROWS: Mapping[Any, int] = {
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._unsafe_masked_index_put_accumulate.default: 3,
    aten.scatter_add.default: 3,
}


def scatters_to_delay(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Scatters into zeros, each with its rows, if waiting for the rows frees memory.

    It does if the rows are smaller than what they are computed from, and than the result.
    """
    return {
        node: rows
        for target in _ROWS
        for node in graph.find_nodes(op="call_function", target=target)
        if (rows := _rows_in_zeros(node)) is not None
        if nbytes(rows) < min(nbytes(node), _freed_bytes(rows))
    }


def may_wait(node: fx.Node) -> bool:
    """Whether ``scatters_to_delay`` has the node in some graph of the step.

    That is, if nothing else reads what its rows are computed from.
    """
    rows = _rows_in_zeros(node)
    if rows is None:
        return False
    read_bytes = sum(map(nbytes, _sources(rows)[1]))
    return nbytes(rows) < min(nbytes(node), read_bytes)


def _rows_in_zeros(node: fx.Node) -> fx.Node | None:
    """The rows that a node adds into zeros of static shape; None if it is no such scatter."""
    position = _ROWS.get(node.target)
    if position is None or not linearity.is_zero(node.args[0]) or not is_static(node.meta["val"]):
        return None
    rows = node.args[position]
    return rows if isinstance(rows, fx.Node) else None


def _freed_bytes(rows: fx.Node) -> int:
    """Bytes of the buffers that the rows are computed from and that nothing else reads."""
    pointwise, buffers = _sources(rows)
    return sum(
        nbytes(node) for node in buffers if pointwise.issuperset(ops.readers_through_views(node))
    )


def _sources(rows: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """What is computed in the rows' own kernel, and the buffers that it reads; no constants."""
    pointwise: set[fx.Node] = set()
    buffers: set[fx.Node] = set()
    stack = [rows]
    while stack:
        node = stack.pop()
        if node in pointwise or node in buffers:
            continue
        if ops.is_pointwise(node) or ops.is_cheap_view(node):
            pointwise.add(node)
            stack.extend(node.all_input_nodes)
        elif node.op == "call_function" and not ops.is_constant(node):
            buffers.add(node)
    return pointwise, buffers
