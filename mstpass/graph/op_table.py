"""The op table: one row for each op that the passes understand, and a default for all others.

Whatever the passes know of an op is in its row: see ``Row`` in op_rows/row.py. The key of a row is
an overload, or a name such as ``aten::mm``, which stands for all overloads without a row of their
own. Rules that a row refers to are in token_rules/ and linearity.py.

To add an op, add its row to the file of its family in op_rows/, and a case to
tests/token_rule_cases.py, which runs it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mstpass.graph.op_rows import calls, dims, elementwise
from mstpass.graph.op_rows.row import PINNED, Row
from mstpass.torch_internals.graphs import OpOverload, name_of, schema_of

TABLE: dict[Any, Row] = {
    **elementwise.pointwise_rows(),
    **elementwise.created_rows(),
    **dims.view_rows(),
    **dims.reduction_rows(),
    **dims.rows_along_dims(),
    **dims.index_rows(),
    **calls.product_rows(),
    **calls.attention_rows(),
    **calls.collective_rows(),
    **calls.other_rows(),
}


@functools.cache
def row_of(target: Any) -> Row:
    """The row of an op, which may be given by name; that of most ops if it has none."""
    row = TABLE.get(target) or TABLE.get(name_of(target))
    return row or _default_row(target)


def _default_row(target: Any) -> Row:
    """Ops are pointwise if PyTorch tags them so, and must not run twice if they are not ATen's.

    Ops that draw random numbers or write to their operands have no token rules, whatever their
    tags say.
    """
    if not isinstance(target, OpOverload):
        return Row("other", repeat=PINNED)
    writes = schema_of(target).is_mutable
    repeat = PINNED if writes or target.namespace not in ("aten", "prims") else ""
    if torch.Tag.pointwise in target.tags and not writes and not may_draw(target):
        return elementwise.pointwise(repeat=repeat)
    return Row("other", repeat=repeat)


def may_draw(target: Any) -> bool:
    """Whether the op is one of those that draw random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
