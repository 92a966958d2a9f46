"""Token rules of products of rows that are grouped by expert (graph/grouped_products.py)::

    grouped_rows    rows [R, k], weights [E, k, n]    ->  [R, n]
    grouped_sums    left [k, R], right [R, n]         ->  [E, k, n]

A loop runs over the rows R, or over features, k or n, of all experts. Each row brings its number
along, by which a chunk knows where its experts end; the ends of the experts are whole. What is
contracted, the rows in the gradient of the weights, or k, is one summand for each chunk.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph.grouped_products import grouped_sums
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, WHOLE, Reduced, Refusal, Spec

_EXPERTS = Refusal("each chunk needs the weights of all experts")


def _spec_of_result(node: fx.Node) -> dict[tuple[fx.Node, Spec], Spec | Reduced]:
    """The spec of the result, by an operand and its spec."""
    left, right, positions = node.args[:3]
    assert all(isinstance(n, fx.Node) for n in (left, right, positions)), "all are nodes"
    found: dict[tuple[object, Spec], Spec | Reduced]
    if node.target is grouped_sums:
        found = {(left, (0,)): (1,), (left, (1,)): SUM, (right, (0,)): SUM, (right, (1,)): (2,)}
        return {**found, (positions, (0,)): SUM}  # type: ignore[dict-item]
    found = {(left, (0,)): (0,), (left, (1,)): SUM, (right, (1,)): SUM, (right, (2,)): (1,)}
    return {**found, (positions, (0,)): (0,)}  # type: ignore[dict-item]


def grouped_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    return _spec_of_result(node).get((operand, spec), _EXPERTS)


def grouped_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    needs: OperandSpecs = dict.fromkeys(node.all_input_nodes, WHOLE)
    found = {n: s for (n, s), result in _spec_of_result(node).items() if result == spec}
    return {**needs, **found} if found or not spec else _EXPERTS


def summed_specs(node: fx.Node) -> OperandSpecs:
    """The specs of the operands of a sum over what the op contracts: the rows, or features."""
    left, right, positions, ends = node.args[:4]
    if node.target is grouped_sums:
        return {left: (1,), right: (0,), positions: (0,), ends: WHOLE}  # type: ignore[dict-item]
    return {left: (1,), right: (1,), positions: WHOLE, ends: WHOLE}  # type: ignore[dict-item]
