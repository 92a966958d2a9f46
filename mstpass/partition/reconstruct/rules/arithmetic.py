"""Inverses of sums, products, quotients, reciprocals and signs.

**Sums** (residual streams). Let ``c = fl(a + b)``, where fl rounds to c's dtype. Then
``b' = fl(c - a)`` differs from b by at most u (|c| + |b'|), where u is the unit roundoff of c's
dtype: what the forward's sum rounded off is lost. In float32 the error is 6e-8 of the stream c. In
bfloat16 it is 4e-3 of c, which at |c| = 64 |b| is a relative error above 0.1 in b; such sums are
refused. If b is bfloat16 and c is float32, casting b' to bfloat16 gives exactly b as long as
|c| < 2^14 |b|: the error is then less than half the distance from b to the nearest other bfloat16
number.

**Products** (norms, scalings). A norm is a chain of inverses: ``y = w * (x - mean) * rstd``, where
``rstd`` and ``mean`` are saved, one number a row. Sources: Tempo (arXiv 2210.10246), InPlace-ABN
(arXiv 1712.02616).
"""

from __future__ import annotations

import math

import torch
from torch import fx

from mstpass.graph.joint import numel
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
    cast_to,
    dtype_of,
    has_shape_of,
    is_float,
    names,
    operands,
    unit_roundoff,
)
from mstpass.partition.reconstruct.rules.functions import excludes_zero, value_range

_LOW_DTYPES = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Operand = fx.Node | float


# ---- sums -----------------------------------------------------------------------------------
def find_sum(node: fx.Node) -> Found:
    """Inverses of add.Tensor and sub.Tensor."""
    for target, other in operands(node):
        reason = _why_no_sum(node, target, other)
        if reason:
            yield Refused(target.name, node.name, "sum", reason)
            continue
        exact = dtype_of(node) in _INTEGERS
        yield Inverse(
            target.name,
            names(node, other),
            node.name,
            "sum",
            EXACT if exact else TOLERANT,
            "none" if exact else _sum_bound(node, target),
            magnifies=not exact,
        )


def _why_no_sum(node: fx.Node, target: fx.Node, other: Operand) -> str:
    """Why an operand does not follow from a sum; empty if it does."""
    dtypes = [dtype_of(n) for n in (node, target, other) if isinstance(n, fx.Node)]
    if node.kwargs.get("alpha", 1) != 1:
        return "alpha is not 1"
    if target is other:
        return "both operands are the same value"
    if not has_shape_of(target, node):
        return "the operand is broadcast: each of its elements is in several sums"
    if all(dtype in _INTEGERS for dtype in dtypes) and len(set(dtypes)) == 1:
        return ""
    if not is_float(node) or not is_float(target):
        return "it is a sum neither of integers of one dtype nor of floats"
    if dtype_of(node) in _LOW_DTYPES:
        name = str(dtype_of(node)).removeprefix("torch.")
        return f"a sum in {name} keeps too few digits of its smaller operand"
    return ""


def _sum_bound(node: fx.Node, target: fx.Node) -> str:
    dtype = dtype_of(node)
    assert dtype is not None, "the dtype is known"
    bound = f"{unit_roundoff(dtype)} (|{node.name}| + |{target.name}|), absolute"
    if dtype_of(target) in _LOW_DTYPES and dtype == torch.float32:
        return f"none while |{node.name}| < 2^14 |{target.name}|, else {bound}"
    return bound


def write_sum(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    a, b = op.args[:2]
    if op.target is aten.add.Tensor:
        other = b if target is a else a
        found = writer.call(aten.sub.Tensor, read(op), _read(read, other))
    elif target is a:
        found = writer.call(aten.add.Tensor, read(op), _read(read, b))
    else:
        found = writer.call(aten.sub.Tensor, _read(read, a), read(op))
    return cast_to(writer, found, dtype_of(target))


def _read(read: Read, operand: object) -> object:
    return read(operand) if isinstance(operand, fx.Node) else operand


# ---- products -------------------------------------------------------------------------------
def find_product(node: fx.Node) -> Found:
    for target, factor in operands(node):
        reason = _why_no_product(node, target, factor)
        if reason:
            yield Refused(target.name, node.name, "product", reason)
        else:
            yield Inverse(
                target.name,
                names(node, factor),
                node.name,
                "product",
                TOLERANT,
                _relative(node, 2),
            )


def _why_no_product(node: fx.Node, target: fx.Node, factor: Operand) -> str:
    """Why an operand does not follow from a product; empty if it does."""
    if not is_float(node) or not is_float(target):
        return "it is not a product of floats"
    if target is factor:
        return "a square loses the sign"
    if not has_shape_of(target, node):
        return "the operand is broadcast: each of its elements is in several products"
    interval = value_range(factor)
    if excludes_zero(interval) and not all(map(math.isinf, interval)):
        return ""
    return "" if is_norm_weight(factor, target) else "the factor may be zero"


def is_norm_weight(factor: Operand, normalized: fx.Node) -> bool:
    """Whether the factor is the weight of a norm whose result before the weight is ``normalized``.

    Such a weight is an input of the step, or 1 + an input, much smaller than the value that it
    scales; and that value is a product with an rsqrt.
    """
    if not isinstance(factor, fx.Node) or numel(factor) * 8 > numel(normalized):
        return False
    inner = _through_casts(normalized)
    scaled = inner.target is aten.mul.Tensor and any(
        isinstance(a, fx.Node) and _is_rsqrt(a) for a in inner.args
    )
    return scaled and _is_parameter(factor)


def _is_parameter(node: fx.Node) -> bool:
    node = _through_casts(node)
    if node.target is aten.add.Tensor:
        inner = [a for a in node.args if isinstance(a, fx.Node)]
        return len(inner) == 1 and _through_casts(inner[0]).op == "placeholder"
    return node.op == "placeholder"


def _is_rsqrt(node: fx.Node) -> bool:
    return _through_casts(node).target is aten.rsqrt.default


def _through_casts(node: fx.Node) -> fx.Node:
    while node.target in (CAST, aten.unsqueeze.default, aten.expand.default, aten.view.default):
        node = node.all_input_nodes[0]
    return node


def write_product(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    a, b = op.args[:2]
    factor = b if target is a else a
    found = writer.call(aten.div.Tensor, read(op), _read(read, factor))
    return cast_to(writer, found, dtype_of(target))


# ---- quotients, reciprocals, signs --------------------------------------------------------------
def find_quotient(node: fx.Node) -> Found:
    dividend, divisor = node.args[:2]
    if not isinstance(dividend, fx.Node):
        return
    if not is_float(node) or not is_float(dividend):
        yield Refused(dividend.name, node.name, "quotient", "it is not a quotient of floats")
    elif dividend is divisor or not has_shape_of(dividend, node):
        yield Refused(dividend.name, node.name, "quotient", "the dividend is broadcast")
    else:
        sources = names(node, divisor)
        bound = _relative(node, 2)
        yield Inverse(dividend.name, sources, node.name, "quotient", TOLERANT, bound)
    if isinstance(divisor, fx.Node) and divisor is not dividend:
        yield Refused(divisor.name, node.name, "quotient", "the quotient may be zero")


def write_quotient(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    found = writer.call(aten.mul.Tensor, read(op), _read(read, op.args[1]))
    return cast_to(writer, found, dtype_of(target))


def find_reciprocal(node: fx.Node) -> Found:
    (operand,) = node.all_input_nodes
    if not is_float(operand):
        yield Refused(operand.name, node.name, "reciprocal", "it is not a reciprocal of floats")
        return
    yield Inverse(operand.name, names(node), node.name, "reciprocal", TOLERANT, _relative(node, 2))


def write_reciprocal(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return writer.call(aten.reciprocal.default, read(op))


def find_neg(node: fx.Node) -> Found:
    (operand,) = node.all_input_nodes
    yield Inverse(operand.name, names(node), node.name, "neg", EXACT)


def write_neg(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return writer.call(aten.neg.default, read(op))


def _relative(node: fx.Node, roundings: int) -> str:
    dtype = dtype_of(node)
    assert dtype is not None, "the dtype is known"
    return f"{roundings} * {unit_roundoff(dtype)}, relative"
