"""The rows that a scatter adds into zeros, as the gradient of an embedding does."""

from __future__ import annotations

from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.joint import nbytes
from mstpass.graph.sizes import is_static


def rows_of(node: fx.Node) -> fx.Node | None:
    """The rows that a scatter adds into zeros, if it may wait for them.

    It may if both have a static shape, and the rows are smaller than the result.
    """
    position = ops.row(node).added_rows  # of the last tensor that it reads
    if position is None or not linearity.is_zero(node.args[0]) or not is_static(node.meta["val"]):
        return None
    rows = node.args[position]
    if not isinstance(rows, fx.Node) or rows.op != "call_function":
        return None
    return rows if nbytes(rows) < nbytes(node) else None
