"""The rules, one row each. docs/reconstruction.md shows the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from mstpass.partition.reconstruct.rule import (
    CAST,
    EXACT,
    TOLERANT,
    Inverse,
    Refused,
    Rule,
    aten,
)
from mstpass.partition.reconstruct.rules import arithmetic, functions, layout, rotary

RULES: tuple[Rule, ...] = (
    Rule(
        "sum",
        (aten.add.Tensor, aten.sub.Tensor),
        "c = a + b: b = c - a; c = a - b: a = c + b, b = a - c",
        TOLERANT,
        "c in float32 or float64 and not broadcast; integers: exact",
        "2^-24 (|c| + |b|), absolute; none for a bfloat16 b while |c| < 2^14 |b|",
        "reversible residual networks (arXiv 1707.04585)",
        arithmetic.find_sum,
        arithmetic.write_sum,
    ),
    Rule(
        "product",
        (aten.mul.Tensor,),
        "c = a f: a = c / f",
        TOLERANT,
        "the graph proves f is not zero (a number, rsqrt, a bounded exp, ...), or f is the weight "
        "of a norm, which is assumed not to be",
        "2 u, relative",
        "Tempo (arXiv 2210.10246), InPlace-ABN (arXiv 1712.02616)",
        arithmetic.find_product,
        arithmetic.write_product,
    ),
    Rule(
        "quotient",
        (aten.div.Tensor,),
        "c = a / f: a = c f",
        TOLERANT,
        "not broadcast",
        "2 u, relative",
        "-",
        arithmetic.find_quotient,
        arithmetic.write_quotient,
    ),
    Rule(
        "reciprocal",
        (aten.reciprocal.default,),
        "c = 1 / a: a = 1 / c",
        TOLERANT,
        "floats",
        "2 u, relative",
        "-",
        arithmetic.find_reciprocal,
        arithmetic.write_reciprocal,
    ),
    Rule(
        "neg",
        (aten.neg.default,),
        "c = -a: a = -c",
        EXACT,
        "-",
        "none",
        "-",
        arithmetic.find_neg,
        arithmetic.write_neg,
    ),
    Rule(
        "function",
        tuple(functions.FUNCTIONS),
        "exp, log, sigmoid, tanh, softplus: log, exp, logit, atanh, y + log(1 - exp(-y))",
        TOLERANT,
        "float32; the graph proves that the argument keeps to the inverse's range",
        "by function: 2^-22 times its condition number",
        "InPlace-ABN (arXiv 1712.02616)",
        functions.find_function,
        functions.write_function,
    ),
    Rule(
        "relu mask",
        (aten.relu.default,),
        "x > 0 is relu(x) > 0",
        EXACT,
        "-",
        "none",
        "InPlace-ABN (arXiv 1712.02616)",
        functions.find_relu,
        functions.write_relu,
    ),
    Rule(
        "rotary",
        (aten.add.Tensor,),
        "y = x cos t + turn(x) sin t: x = y cos t - turn(y) sin t",
        TOLERANT,
        "cos and sin of one angle that both halves share",
        "8 u of the pair",
        "RoFormer (arXiv 2104.09864)",
        rotary.find_rotary,
        rotary.write_rotary,
    ),
    Rule(
        "view",
        (
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        "the first shape again",
        EXACT,
        "its sizes can be written",
        "none",
        "-",
        layout.find_view,
        layout.write_view,
    ),
    Rule(
        "permute",
        (aten.permute.default, aten.transpose.int, aten.t.default),
        "the inverse permutation",
        EXACT,
        "-",
        "none",
        "-",
        layout.find_permute,
        layout.write_permute,
    ),
    Rule(
        "copy",
        (aten.clone.default,),
        "the copy itself",
        EXACT,
        "-",
        "none",
        "-",
        layout.find_copy,
        layout.write_copy,
    ),
    Rule(
        "expand",
        (aten.expand.default,),
        "expand, repeat_kv: one of the equal copies",
        EXACT,
        "-",
        "none",
        "-",
        layout.find_expand,
        layout.write_expand,
    ),
    Rule(
        "cast",
        (CAST,),
        "the first type again",
        EXACT,
        "lossless, such as bfloat16 to float32; float32 to bfloat16: tolerant",
        "none; 2^-9 relative for float32 that became bfloat16",
        "-",
        layout.find_cast,
        layout.write_cast,
    ),
)

BY_NAME: Mapping[str, Rule] = {rule.name: rule for rule in RULES}
_BY_OP: dict[Any, list[Rule]] = {}
for _rule in RULES:
    for _op in _rule.ops:
        _BY_OP.setdefault(_op, []).append(_rule)


def inverses_of(node: fx.Node) -> list[Inverse | Refused]:
    """What every rule says of the node's operands; nothing for an op without a rule."""
    rules = _BY_OP.get(node.target, []) if node.op == "call_function" else []
    return [found for rule in rules for found in rule.find(node)]
