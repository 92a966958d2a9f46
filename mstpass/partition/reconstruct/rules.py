"""The reconstruction rules: how to compute an operand of an op from the op's result.

    c = op(a, b)        in the forward
    a = inverse(c, b)   an ``Inverse`` with the target a and the sources (c, b)

A rule reads only the graph, and inverts an operand only where the graph shows that it follows from
the result. docs/reconstruction.md has the table of rules, with what they do not invert and why.

**Sums** (residual streams). Let ``c = fl(a + b)``, where fl rounds to c's dtype. Then
``b' = fl(c - a)`` differs from b by at most u (|c| + |b'|), where u is the unit roundoff of c's
dtype: what the forward's sum rounded off is lost. In float32 the error is 6e-8 of the stream c. In
bfloat16 it is 4e-3 of c, which at |c| = 64 |b| is a relative error above 0.1 in b; such sums are
not inverted. If b is bfloat16 and c is float32, casting b' to bfloat16 gives exactly b as long as
|c| < 2^14 |b|: the error is then less than half the distance from b to the nearest other bfloat16
number.

**Products** (norms, scalings). A norm is a chain of inverses: ``y = w * (x - mean) * rstd``, where
``rstd`` and ``mean`` are saved, one number a row. ``rsqrt`` of a finite float32 number is at least
5e-20; infinite operands are not considered. Sources: Tempo (arXiv 2210.10246), InPlace-ABN (arXiv
1712.02616).

**Views, copies and casts** link other inverses to chains. They are exact but for floats that were
rounded to a narrower dtype, which come back rounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

from mstpass.graph.builder import Builder, SizeNodes
from mstpass.graph.joint import numel, value_of
from mstpass.graph.sizes import same_shape
from mstpass.graph.token_rules.arguments import ints

EXACT, TOLERANT = "exact", "tolerant"
aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
_WIDE_DTYPES = (torch.float32, torch.float64)
_LOW_DTYPES = (torch.bfloat16, torch.float16)
# Every number of the first dtype is a number of the second.
_LOSSLESS = frozenset(
    {
        *((low, wide) for low in _LOW_DTYPES for wide in _WIDE_DTYPES),
        (torch.float32, torch.float64),
    }
)


@dataclasses.dataclass(frozen=True)
class Inverse:
    """One way to compute a forward value from later ones. Nodes are given by name.

    Attributes:
        target: the value to compute.
        sources: the values it is computed from; the first is the result of ``op``.
        op: the forward node that is inverted.
        rule: name of the rule.
        grade: ``"exact"``: the same bits for every input; ``"tolerant"``: within ``bound``.
        bound: the error of a tolerant inverse, as text.
        coarse: the target is known to fewer digits than its type has.
        magnifies: the error of a source may be larger relative to the target than to the source,
            as in the difference of two numbers that are nearly equal. It reads no coarse value.
    """

    target: str
    sources: tuple[str, ...]
    op: str
    rule: str
    grade: str
    bound: str = "none"
    coarse: bool = False
    magnifies: bool = False


Operand = fx.Node | float
Read = Callable[[fx.Node], fx.Node]


# ---- sums ----------------------------------------------------------------------------------------
def _of_sum(node: fx.Node) -> Iterator[Inverse]:
    if dtype_of(node) not in _WIDE_DTYPES or node.kwargs.get("alpha", 1) != 1:
        return
    for target, other in _operands(node):
        bound = f"{_unit_roundoff(node)} (|{node.name}| + |{target.name}|), absolute"
        if dtype_of(target) in _LOW_DTYPES and dtype_of(node) == torch.float32:
            bound = f"none while |{node.name}| < 2^14 |{target.name}|, else {bound}"
        sources = _names(node, other)
        yield Inverse(target.name, sources, node.name, "sum", TOLERANT, bound, magnifies=True)


def _write_sum(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    a, b = op.args[:2]
    other = _read(read, b if target is a else a)
    if op.target is aten.add.Tensor:
        found = builder.call(aten.sub.Tensor, read(op), other)
    elif target is a:
        found = builder.call(aten.add.Tensor, read(op), other)
    else:
        found = builder.call(aten.sub.Tensor, other, read(op))
    return _cast_to(builder, found, dtype_of(target))


# ---- products ------------------------------------------------------------------------------------
def _of_product(node: fx.Node) -> Iterator[Inverse]:
    for target, factor in _operands(node):
        if _is_never_zero(factor) or _is_norm_weight(factor, target):
            bound = f"2 * {_unit_roundoff(node)}, relative"
            yield Inverse(target.name, _names(node, factor), node.name, "product", TOLERANT, bound)


def _is_never_zero(factor: Operand) -> bool:
    """Whether a factor is a number or an ``rsqrt``."""
    if isinstance(factor, fx.Node):
        return _is_rsqrt(factor)
    return math.isfinite(factor) and factor != 0


def _is_norm_weight(factor: Operand, normalized: fx.Node) -> bool:
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


def _write_product(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    a, b = op.args[:2]
    found = builder.call(aten.div.Tensor, read(op), _read(read, b if target is a else a))
    return _cast_to(builder, found, dtype_of(target))


def _of_quotient(node: fx.Node) -> Iterator[Inverse]:
    dividend, divisor = node.args[:2]
    if any(target is dividend for target, _ in _operands(node)):
        bound, sources = f"2 * {_unit_roundoff(node)}, relative", _names(node, divisor)
        yield Inverse(_names(dividend)[0], sources, node.name, "quotient", TOLERANT, bound)


def _write_quotient(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    found = builder.call(aten.mul.Tensor, read(op), _read(read, op.args[1]))
    return _cast_to(builder, found, dtype_of(target))


# ---- views, copies and casts ---------------------------------------------------------------------
def _exact(rule: str) -> Callable[[fx.Node], Iterator[Inverse]]:
    def of(node: fx.Node) -> Iterator[Inverse]:
        yield Inverse(node.all_input_nodes[0].name, _names(node), node.name, rule, EXACT)

    return of


def _write_view(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return builder.call(aten.reshape.default, read(op), shape_of(builder, target))


def _write_permute(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    order = _permutation(op)
    return builder.call(aten.permute.default, read(op), [order.index(d) for d in range(len(order))])


def _permutation(op: fx.Node) -> list[int]:
    """For each dim of the result the dim of the operand."""
    dims = list(range(op.meta["val"].dim()))
    if op.target is aten.permute.default:
        return [d % len(dims) for d in ints(op.args[1])]
    a, b = (0, -1) if op.target is aten.t.default else op.args[1:3]
    dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
    return dims


def _write_copy(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return read(op)


def _of_cast(node: fx.Node) -> Iterator[Inverse]:
    """A cast to float16 may overflow, and other casts lose more than digits."""
    (operand,) = node.all_input_nodes
    before, after = dtype_of(operand), dtype_of(node)
    (exact,) = _exact("cast")(node)
    if before == after or (before, after) in _LOSSLESS:
        yield exact
    elif (after, before) in _LOSSLESS and after != torch.float16:
        bound = f"{_unit_roundoff(node)}, relative"
        yield dataclasses.replace(exact, grade=TOLERANT, bound=bound, coarse=True)


def _write_cast(builder: Builder, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    return builder.call(CAST, read(op), dtype_of(target))


# ---- the table -----------------------------------------------------------------------------------
class Rule(NamedTuple):
    """One row of the table in docs/reconstruction.md.

    Attributes:
        of: the inverses of one node of its ops.
        write: ``write(builder, op, target, read)`` adds the nodes that compute the target, and
            returns the last of them; ``read`` gives the node that backward reads for a forward
            node.
    """

    of: Callable[[fx.Node], Iterator[Inverse]]
    write: Callable[[Builder, fx.Node, fx.Node, Read], fx.Node]


RULES: Mapping[str, Rule] = {
    "sum": Rule(_of_sum, _write_sum),
    "product": Rule(_of_product, _write_product),
    "quotient": Rule(_of_quotient, _write_quotient),
    "view": Rule(_exact("view"), _write_view),
    "permute": Rule(_exact("permute"), _write_permute),
    "copy": Rule(_exact("copy"), _write_copy),
    "cast": Rule(_of_cast, _write_cast),
}
RULE_OF: Mapping[object, str] = {
    aten.add.Tensor: "sum",
    aten.sub.Tensor: "sum",
    aten.mul.Tensor: "product",
    aten.div.Tensor: "quotient",
    aten.view.default: "view",
    aten.reshape.default: "view",
    aten._unsafe_view.default: "view",
    aten.unsqueeze.default: "view",
    aten.squeeze.dim: "view",
    aten.squeeze.dims: "view",
    aten.permute.default: "permute",
    aten.t.default: "permute",
    aten.transpose.int: "permute",
    aten.clone.default: "copy",
    CAST: "cast",
}


def inverses_of(node: fx.Node) -> list[Inverse]:
    """How the operands of a node follow from its result."""
    return list(RULES[RULE_OF[node.target]].of(node)) if node.target in RULE_OF else []


# ---- nodes ---------------------------------------------------------------------------------------
def _operands(node: fx.Node) -> Iterator[tuple[fx.Node, Operand]]:
    """The operands of a binary op of floats that are neither broadcast nor read twice.

    Each with the other operand, a node or a number.
    """
    a, b = node.args[:2]
    for target, other in ((a, b), (b, a)):
        if isinstance(target, fx.Node) and target is not other and _is_float(node):
            if _is_float(target) and _has_shape_of(target, node):
                yield target, other  # type: ignore[misc]


def _names(*nodes: object) -> tuple[str, ...]:
    """Names of those arguments that are nodes, each once."""
    return tuple(dict.fromkeys(n.name for n in nodes if isinstance(n, fx.Node)))


def dtype_of(node: fx.Node) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype


def _is_float(node: fx.Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def _has_shape_of(operand: fx.Node, result: fx.Node) -> bool:
    a, b = value_of(operand), value_of(result)
    return a is not None and b is not None and same_shape(a.shape, b.shape)


def _unit_roundoff(node: fx.Node) -> str:
    """Half the distance from 1 to the next larger number, as text: ``2^-24`` for float32."""
    dtype = dtype_of(node)
    assert dtype is not None, "the dtype is known"
    return f"2^{round(math.log2(torch.finfo(dtype).eps)) - 1}"


def shape_of(builder: Builder, node: fx.Node) -> list[int | fx.Node]:
    """The node's shape as an op's argument.

    Raises:
        UnknownSize: a symbolic size that no input of the graph holds.
    """
    value = value_of(node)
    assert value is not None, "the op gives one tensor"
    return SizeNodes.of_inputs(builder).arguments(value.shape)


def _read(read: Read, operand: object) -> object:
    return read(operand) if isinstance(operand, fx.Node) else operand


def _cast_to(builder: Builder, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    return node if dtype_of(node) == dtype else builder.call(CAST, node, dtype)
