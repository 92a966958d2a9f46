"""Where a loop's operands are: on the host, or where its own results are written.

Nodes copy a value to the host and back (torch_internals/host_copy_ops.py).

A loop can copy an operand from the host itself, the rows of one chunk at a time. ::

    mstpass::rows_on_host(host, device) -> value

stands for a value whose rows wait on the host. A loop that reads it, itself or through views,
copies what a chunk needs (loops/lowering.py). Called as it is, the op copies all of it.

Results of a loop may be written over one of its operands, row by row. A chunk reads its rows of an
operand and writes rows of a result of the same layout: the gradient of a block's output, for
example, and that of its input. If nothing else reads the operand, both need one buffer. A plan
foresees that (loops/region_loops.py); of a finished graph it is asked here."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import nbytes, numel, value_of
from mstpass.graph.loop_op import mst_loop, overwritten
from mstpass.graph.sizes import generic_shape, generic_stride, hint
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


# ---- operands that results are written over ------------------------------------------------------
def written_over(node: fx.Node) -> fx.Node | None:
    """The operand that a result of a loop is written over; None for all other nodes."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    if call is None or call.target is not mst_loop:
        return None
    specs, sliced = call.args[4:6]
    position = overwritten(specs[node.args[1]][0])
    if position is None or not is_last_reader(call, sliced[position]):
        return None
    operand: fx.Node = sliced[position]
    return operand


def is_last_reader(call: fx.Node, operand: fx.Node) -> bool:
    """Whether a loop may write over an operand: the graph computes it for the loop alone."""
    base = ops.base_of(operand)
    return (
        base.op == "call_function"
        and numel(base) == numel(operand)
        and is_row_by_row(operand)
        and ops.readers_through_views(base) == [call]
    )


def is_row_by_row(node: fx.Node) -> bool:
    """Whether the rows lie one behind the other, as those of a loop's results do."""
    value = value_of(node)
    assert value is not None, "the op gives one tensor"
    sizes, strides = generic_shape(value), generic_stride(value)
    return all(
        size == 1 or stride == math.prod(sizes[dim + 1 :])
        for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True))
    )
