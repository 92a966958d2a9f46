"""Products of rows that are grouped by expert, of a chunk of the rows.

The rows are sorted by expert; ``ends[e]`` is the number of the row behind the last one of expert e.
A chunk of the rows is told by ``positions``, the numbers of its rows: those of expert e end at
``clamp(ends[e] - positions[0], 0, rows of the chunk)`` in it. So the ops below give for a chunk of
``rows`` and ``positions`` what they give for these rows among all::

    mstpass::grouped_rows(rows, weights, positions, ends)         y[e] = rows[e] @ weights[e]
    mstpass::grouped_sums(left, right, positions, ends, dtype)    z[e] = left[:, e] @ right[e]
    mstpass::add_grouped_(total, left, right, positions, ends, chunk)
                                                                  total  = z    if chunk is 0
                                                                  total += z    otherwise

where ``e`` among rows stands for the rows of expert e. Shapes: rows [R, k], weights [E, k, n],
left [k, R], right [R, n], positions [R], ends [E], total [E, k, n]. Rows behind ``ends[-1]`` belong
to no expert: their results are zero.

The semantics are those of ``aten._grouped_mm`` (aten/src/ATen/native/GroupedMMUtils.h), which does
the work on CUDA in bfloat16. Elsewhere each expert is a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from mstpass.torch_internals.graphs import own_op


def _grouped_rows(rows: Tensor, weights: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    found = rows.new_zeros(rows.shape[0], weights.shape[2])
    if _is_native(rows):
        here = _ends_in_chunk(positions, ends)
        result = grouped_mm(rows, weights, offs=here.to(torch.int32))
        inside = torch.arange(len(rows), device=rows.device) < here[-1]
        return torch.where(inside[:, None], result, found)  # it leaves the other rows as they were
    for expert, start, end in _groups(positions, ends):
        torch.mm(rows[start:end], weights[expert], out=found[start:end])
    return found


def _grouped_sums(
    left: Tensor, right: Tensor, positions: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    shape = ends.shape[0], left.shape[0], right.shape[1]
    total = torch.empty(shape, dtype=dtype, device=right.device)
    _add_grouped(total, left, right, positions, ends, 0)
    return total


def _add_grouped(
    total: Tensor, left: Tensor, right: Tensor, positions: Tensor, ends: Tensor, chunk: int
) -> None:
    """Add to the total; the first chunk, of number 0, writes it."""
    if not chunk:
        total.zero_()
    for expert, start, end in _groups(positions, ends):
        add_product(total[expert], left[:, start:end], right[start:end])


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> None:
    """Add a product of matrices, or of batches of them, to ``beta`` times the total."""
    add = torch.addmm if total.dim() == 2 else torch.baddbmm
    if left.dtype == total.dtype:
        add(total, left, right, beta=beta, out=total)
    elif total.is_cuda:
        add(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:  # only CUDA has products whose result is wider than their factors
        add(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def _is_native(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows) > 0


def _ends_in_chunk(positions: Tensor, ends: Tensor) -> Tensor:
    return (ends.to(torch.int64) - positions[:1]).clamp(0, len(positions))


def _groups(positions: Tensor, ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Of each expert that has rows in the chunk: its number, its first row, and the row behind."""
    start = 0
    for expert, end in enumerate(
        _ends_in_chunk(positions, ends).tolist() if len(positions) else ()
    ):
        if end > start:
            yield expert, start, end
            start = end


grouped_rows = own_op(
    "grouped_rows(Tensor rows, Tensor weights, Tensor positions, Tensor ends) -> Tensor",
    _grouped_rows,
    lambda rows, weights, positions, ends: rows.new_empty(rows.shape[0], weights.shape[2]),
)
grouped_sums = own_op(
    "grouped_sums(Tensor left, Tensor right, Tensor positions, Tensor ends, ScalarType dtype)"
    " -> Tensor",
    _grouped_sums,
    lambda left, right, positions, ends, dtype: right.new_empty(
        ends.shape[0], left.shape[0], right.shape[1], dtype=dtype
    ),
)
add_grouped_ = own_op(
    "add_grouped_(Tensor(a!) total, Tensor left, Tensor right, Tensor positions, Tensor ends, "
    "SymInt chunk) -> ()",
    _add_grouped,
    lambda *_: None,
)
GROUPED_OPS = (grouped_rows, grouped_sums, add_grouped_)
