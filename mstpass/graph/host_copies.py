"""Nodes that copy a value to the host and back (torch_internals/host_copy_ops.py).

A loop can copy an operand from the host itself, the rows of one chunk at a time. ::

    mstpass::rows_on_host(host, device) -> value

stands for a value whose rows wait on the host. A loop that reads it, itself or through views,
copies what a chunk needs (loops/lowering.py). Called as it is, the op copies all of it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import nbytes, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.sizes import hint
from mstpass.graph.written_over import is_row_by_row
from mstpass.torch_internals import host_copy_ops

DEVICE_TYPE = "cuda"  # of the devices whose values may wait on the host


def is_host_copy(node: fx.Node) -> bool:
    """Whether the node begins a copy or waits for one."""
    return node.op == "call_function" and node.target in host_copy_ops.all_ops()


def is_wait_for_reload(node: fx.Node) -> bool:
    """Whether the node waits until a value is back on the device: it is a view of the copy."""
    return _is_wait(node) and node.all_input_nodes[0].target is host_copy_ops.RELOAD


def is_rows_on_host(node: fx.Node) -> bool:
    """Whether the node stands for a value on the host of which loops copy rows."""
    return node.op == "call_function" and node.target is host_copy_ops.ROWS_ON_HOST


def is_on_host(node: fx.Node) -> bool:
    """Whether the value of a graph for a GPU lies in the host's memory: what the copies return
    there, and the input that a backward copies back."""
    if node.op == "placeholder":
        return any(
            user.target in (host_copy_ops.RELOAD, host_copy_ops.ROWS_ON_HOST) for user in node.users
        )
    if is_rows_on_host(node):
        return True
    if _is_wait(node):
        return not is_wait_for_reload(node)
    return node.target is host_copy_ops.OFFLOAD


def _is_wait(node: fx.Node) -> bool:
    return node.target is host_copy_ops.WAIT


def rows_on_host(node: fx.Node) -> bool:
    """Whether the value is one whose rows wait on the host, or a view of it."""
    return is_rows_on_host(ops.base_of(node))


def is_in_rows(node: fx.Node) -> bool:
    """Whether a value and its storage lie in memory row by row.

    So they do on the host, where the same views show the same elements, and rows are one run of
    memory.
    """
    values = node, ops.base_of(node)
    return all(value_of(n) is not None and is_row_by_row(n) for n in values)


def bytes_of_rows(node: fx.Node, total: Any, length: int) -> int:
    """The bytes of so many rows of a value that has ``total`` rows, in the batch at hand."""
    rows = max(1, hint(total))
    return nbytes(node) * min(length, rows) // rows


def operands_in_rows(call: fx.Node) -> tuple[tuple[str, int], ...]:
    """``Op.in_rows`` of a node: empty unless it is a loop."""
    if call.target is not mst_loop:
        return ()
    arguments: Any = call.args
    _, _, length, total, _, sliced, whole = arguments
    total = total.meta["val"] if isinstance(total, fx.Node) else total
    return tuple(
        (node.name, bytes_of_rows(node, total, length))
        for node in dict.fromkeys(sliced)
        if node not in whole and is_in_rows(node)
    )
