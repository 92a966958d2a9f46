"""Token rules of products of rows that are grouped by expert (graph/grouped_products.py).

The rows are the tokens. Each brings its number along, by which a chunk knows where its experts end.
The weights and the ends of the experts are whole. A sum over the rows, as in the gradient of the
weights, is one summand for each chunk.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph.grouped_products import grouped_sums
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import SUM, WHOLE, Reduced, Refusal, Spec

_ROWS, _COLUMNS = (0,), (1,)
_FEATURES = "the features of experts are no tokens"


def grouped_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    left, right, positions = node.args[:3]
    if node.target is grouped_sums:
        expected = {left: _COLUMNS, right: _ROWS, positions: _ROWS}
        return SUM if expected.get(operand) == spec else Refusal(_FEATURES)
    return spec if operand in (left, positions) and spec == _ROWS else Refusal(_FEATURES)


def grouped_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    needs: OperandSpecs = dict.fromkeys(node.all_input_nodes, WHOLE)
    if not spec:
        return needs
    if node.target is grouped_sums or spec != _ROWS:
        return Refusal(_FEATURES)
    rows, _, positions = node.args[:3]
    assert isinstance(rows, fx.Node) and isinstance(positions, fx.Node)
    return {**needs, rows: _ROWS, positions: _ROWS}


def summed_specs(node: fx.Node) -> OperandSpecs:
    """The specs of the operands of a sum over the rows."""
    left, right, positions, ends = node.args[:4]
    return {left: _COLUMNS, right: _ROWS, positions: _ROWS, ends: WHOLE}  # type: ignore[dict-item]
