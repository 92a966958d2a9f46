"""The rows that a scatter adds into zeros, as the gradient of an embedding does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import linearity
from mstpass.graph.joint import nbytes
from mstpass.graph.sizes import is_static

aten = torch.ops.aten

# Ops that add rows into zeros, and the position of the rows among their arguments: the last of the
# tensors that each of them reads.
_ROWS: Mapping[Any, int] = {
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._unsafe_masked_index_put_accumulate.default: 3,
    aten.scatter_add.default: 3,
}


def rows_of(node: fx.Node) -> fx.Node | None:
    """The rows that a scatter adds into zeros, if it may wait for them.

    It may if both have a static shape, and the rows are smaller than the result.
    """
    position = _ROWS.get(node.target)
    if position is None or not linearity.is_zero(node.args[0]) or not is_static(node.meta["val"]):
        return None
    rows = node.args[position]
    if not isinstance(rows, fx.Node) or rows.op != "call_function":
        return None
    return rows if nbytes(rows) < nbytes(node) else None
