"""Concatenations: which operands are computed in their places in the result.

On a CPU, Inductor gives a concatenation a buffer, and the kernels of its operands write into that,
the first of them once it is allocated (``ConcatKernel`` in torch/_inductor/ir.py). An operand that
has a buffer already, as an input or a view has, is copied. Nothing here needs PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from mstpass.problem.op import CALL, INPUT, POINTWISE, REALIZED, REDUCTION, VIEW, Op

_COMPUTED = frozenset({POINTWISE, REALIZED, REDUCTION})


def in_place(
    op: Mapping[str, Op], users: Mapping[str, Sequence[str]], kept: Set[str]
) -> tuple[dict[str, Op], dict[str, frozenset[str]]]:
    """The operands that are computed in their places, and their concatenations, as other ops.

    The operand that is computed first has the bytes of the whole, and the others have none. Nor has
    the whole: it is a view of its operands, or the kernel that copies the others of them.

    Args:
        op: the ops of the graph, by name and in order.
        users: the names of those that read each, in order.
        kept: names of the values that leave the graph.

    Returns:
        The ops, and of each concatenation the operands that are in their places.
    """
    found: dict[str, Op] = {}
    parts_of: dict[str, frozenset[str]] = {}
    for whole in op.values():
        if not whole.concatenates or whole.kind == INPUT:  # which the forward has saved
            continue
        parts = frozenset(
            part
            for part in whole.inputs
            if part in op and part not in kept and part not in found
            if _is_placed(op, users, part)
        )
        parts_of[whole.name] = parts
        first = next((name for name in op if name in parts), "")
        for part in parts:
            size = whole.bytes if part == first else 0
            found[part] = dataclasses.replace(op[part], bytes=size)
        if len(parts) == len(whole.inputs):
            found[whole.name] = dataclasses.replace(whole, kind=VIEW, own_loops=True)
        else:
            size = 0 if parts else whole.bytes
            copies = dataclasses.replace(whole, kind=REALIZED, bytes=size, own_loops=True)
            found[whole.name] = copies
    return found, parts_of


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
