"""Inverses of views, copies and casts, which link other inverses to chains.

All are exact but one: a float that was rounded to a narrower dtype comes back rounded.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.token_rules.arguments import ints
from mstpass.partition.reconstruct.rule import (
    CAST,
    EXACT,
    TOLERANT,
    Found,
    Inverse,
    Read,
    Refused,
    Writer,
    aten,
    dtype_of,
    names,
    rank,
    shape,
    unit_roundoff,
)

# Every number of the first dtype is a number of the second.
_LOSSLESS = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    }
)


def _exact(rule: str, node: fx.Node) -> Inverse:
    return Inverse(node.all_input_nodes[0].name, names(node), node.name, rule, EXACT)


# ---- views ---------------------------------------------------------------------------------------
def find_view(node: fx.Node) -> Found:
    yield _exact("view", node)


def write_view(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return writer.call(aten.reshape.default, read(op), writer.shape(target))


def find_permute(node: fx.Node) -> Found:
    yield _exact("permute", node)


def write_permute(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    order = _permutation(op)
    return writer.call(aten.permute.default, read(op), [order.index(d) for d in range(len(order))])


def _permutation(op: fx.Node) -> list[int]:
    """For each dim of the result the dim of the operand."""
    dims = list(range(rank(op)))
    if op.target is aten.permute.default:
        return [d % len(dims) for d in ints(op.args[1])]
    a, b = (0, -1) if op.target is aten.t.default else op.args[1:3]
    dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
    return dims


# ---- copies -----------------------------------------------------------------------------------
def find_copy(node: fx.Node) -> Found:
    yield _exact("copy", node)


def write_copy(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return read(op)


def find_expand(node: fx.Node) -> Found:
    yield _exact("expand", node)


def write_expand(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    """Write the first of the equal copies along each dim."""
    found = read(op)
    while rank(found) > rank(target):
        found = writer.call(aten.select.int, found, 0, 0)
    for dim, (wanted, size) in enumerate(zip(shape(target), shape(found), strict=True)):
        if wanted != size:
            found = writer.call(aten.slice.Tensor, found, dim, 0, 1)
    return found


# ---- casts ------------------------------------------------------------------------------------
def find_cast(node: fx.Node) -> Found:
    (operand,) = node.all_input_nodes
    before, after = dtype_of(operand), dtype_of(node)
    if before is None or after is None:
        return
    if before == after or (before, after) in _LOSSLESS:
        yield _exact("cast", node)
    elif (after, before) not in _LOSSLESS:
        reason = f"{before} to {after} is neither lossless nor a rounding of floats"
        yield Refused(operand.name, node.name, "cast", reason)
    elif after == torch.float16:
        yield Refused(operand.name, node.name, "cast", "a cast to float16 may overflow")
    else:
        bound = f"{unit_roundoff(after)}, relative"
        source = names(node)
        yield Inverse(operand.name, source, node.name, "cast", TOLERANT, bound, coarse=True)


def write_cast(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return writer.call(CAST, read(op), dtype_of(target))
