"""Which concatenations are no kernel: each operand is computed in its place in the result.

On a CPU, Inductor gives a concatenation a buffer, and the kernels of its operands write into that,
the first of them once it is allocated (``ConcatKernel`` in torch/_inductor/ir.py). An operand that
has a buffer already, as an input or a view has, is copied. Nothing here needs PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from mstpass.problem.op import CALL, POINTWISE, REALIZED, REDUCTION, VIEW, Op

_COMPUTED = frozenset({POINTWISE, REALIZED, REDUCTION})


def in_place(
    op: Mapping[str, Op], users: Mapping[str, Sequence[str]], kept: Set[str]
) -> dict[str, Op]:
    """The concatenations that are no kernel, as views of their operands, and these operands.

    The first operand has the bytes of the whole, and the others have none.

    Args:
        op: the ops of the graph, by name and in order.
        users: the names of those that read each, in order.
        kept: names of the values that leave the graph.
    """
    found: dict[str, Op] = {}
    for whole in op.values():
        parts = whole.inputs  # none where the result is an input, saved by the forward
        if (
            whole.concatenates
            and parts
            and all(
                part in op
                and part not in kept
                and part not in found
                and _is_placed(op, users, part)
                for part in parts
            )
        ):
            sizes = (whole.bytes, *[0] * (len(parts) - 1))
            for part, size in zip(parts, sizes, strict=True):
                found[part] = dataclasses.replace(op[part], bytes=size)
            found[whole.name] = dataclasses.replace(whole, kind=VIEW, own_loops=True)
    return found


def _is_placed(op: Mapping[str, Op], users: Mapping[str, Sequence[str]], part: str) -> bool:
    """Whether a value may be computed in a part of another one's buffer.

    A view or a call that reads it before fixes where it lies.
    """
    value = op[part]
    if value.kind not in _COMPUTED and not (value.kind == CALL and value.writes_anywhere):
        return False
    for user in users[part]:
        if op[user].concatenates:
            return True
        if op[user].kind in (VIEW, CALL):
            return False
    return True
