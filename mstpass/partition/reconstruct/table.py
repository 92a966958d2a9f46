"""All reconstruction rules, one row each. docs/reconstruction.md shows the same table.

The rows of the op table name the rules that invert their op.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mstpass.graph import ops
from mstpass.partition.reconstruct.rule import EXACT, TOLERANT, Inverse, Refused, Rule
from mstpass.partition.reconstruct.rules import arithmetic, functions, layout, rotary

RULES: tuple[Rule, ...] = (
    Rule(
        name="sum",
        algebra="c = a + b: b = c - a; c = a - b: a = c + b, b = a - c",
        grade=TOLERANT,
        condition="c in float32 or float64 and not broadcast; integers: exact",
        bound="2^-24 (|c| + |b|), absolute; none for a bfloat16 b while |c| < 2^14 |b|",
        source="reversible residual networks (arXiv 1707.04585)",
        find=arithmetic.find_sum,
        write=arithmetic.write_sum,
    ),
    Rule(
        name="product",
        algebra="c = a f: a = c / f",
        grade=TOLERANT,
        condition=(
            "the graph proves f is not zero (a number, rsqrt, a bounded exp, ...), or f is the "
            "weight of a norm, which is assumed not to be"
        ),
        bound="2 u, relative",
        source="Tempo (arXiv 2210.10246), InPlace-ABN (arXiv 1712.02616)",
        find=arithmetic.find_product,
        write=arithmetic.write_product,
    ),
    Rule(
        name="quotient",
        algebra="c = a / f: a = c f",
        grade=TOLERANT,
        condition="not broadcast",
        bound="2 u, relative",
        source="-",
        find=arithmetic.find_quotient,
        write=arithmetic.write_quotient,
    ),
    Rule(
        name="reciprocal",
        algebra="c = 1 / a: a = 1 / c",
        grade=TOLERANT,
        condition="floats",
        bound="2 u, relative",
        source="-",
        find=arithmetic.find_reciprocal,
        write=arithmetic.write_reciprocal,
    ),
    Rule(
        name="neg",
        algebra="c = -a: a = -c",
        grade=EXACT,
        condition="-",
        bound="none",
        source="-",
        find=arithmetic.find_neg,
        write=arithmetic.write_neg,
    ),
    Rule(
        name="function",
        algebra="exp, log, sigmoid, tanh, softplus: log, exp, logit, atanh, y + log(1 - exp(-y))",
        grade=TOLERANT,
        condition="float32; the graph proves that the argument keeps to the inverse's range",
        bound="by function: 2^-22 times its condition number",
        source="InPlace-ABN (arXiv 1712.02616)",
        find=functions.find_function,
        write=functions.write_function,
    ),
    Rule(
        name="relu mask",
        algebra="x > 0 is relu(x) > 0",
        grade=EXACT,
        condition="-",
        bound="none",
        source="InPlace-ABN (arXiv 1712.02616)",
        find=functions.find_relu,
        write=functions.write_relu,
    ),
    Rule(
        name="rotary",
        algebra="y = x cos t + turn(x) sin t: x = y cos t - turn(y) sin t",
        grade=TOLERANT,
        condition="cos and sin of one angle that both halves share",
        bound="8 u of the pair",
        source="RoFormer (arXiv 2104.09864)",
        find=rotary.find_rotary,
        write=rotary.write_rotary,
    ),
    Rule(
        name="view",
        algebra="the first shape again",
        grade=EXACT,
        condition="its sizes can be written",
        bound="none",
        source="-",
        find=layout.find_view,
        write=layout.write_view,
    ),
    Rule(
        name="permute",
        algebra="the inverse permutation",
        grade=EXACT,
        condition="-",
        bound="none",
        source="-",
        find=layout.find_permute,
        write=layout.write_permute,
    ),
    Rule(
        name="copy",
        algebra="the copy itself",
        grade=EXACT,
        condition="-",
        bound="none",
        source="-",
        find=layout.find_copy,
        write=layout.write_copy,
    ),
    Rule(
        name="expand",
        algebra="expand, repeat_kv: one of the equal copies",
        grade=EXACT,
        condition="-",
        bound="none",
        source="-",
        find=layout.find_expand,
        write=layout.write_expand,
    ),
    Rule(
        name="cast",
        algebra="the first type again",
        grade=EXACT,
        condition="lossless, such as bfloat16 to float32; float32 to bfloat16: tolerant",
        bound="none; 2^-9 relative for float32 that became bfloat16",
        source="-",
        find=layout.find_cast,
        write=layout.write_cast,
    ),
)

RULE_BY_NAME: Mapping[str, Rule] = {rule.name: rule for rule in RULES}


def inverses_of(node: fx.Node) -> list[Inverse | Refused]:
    """The answers of all rules for the operands of a node; none if no rule inverts its op."""
    rules = (RULE_BY_NAME[name] for name in ops.row(node).inverses)
    return [found for rule in rules for found in rule.find(node)]
