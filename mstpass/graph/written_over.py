"""Results of a loop that are written over one of its operands, row by row.

A chunk reads its rows of an operand and writes rows of a result of the same layout: the gradient of
a block's output, for example, and that of its input. If nothing else reads the operand, both need
one buffer. A plan foresees that (loops/region_loops.py); of a finished graph it is asked here.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import numel, value_of
from mstpass.graph.loop_op import mst_loop, overwritten
from mstpass.graph.sizes import generic_shape, generic_stride


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
