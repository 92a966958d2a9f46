"""Token rules of ``_scaled_mm``: a product of float8 matrices, each with scales.

    result = (left * scale_left) @ (right * scale_right)

Scales by row have the shapes ``[M, 1]`` and ``[1, N]``, those of a whole matrix one element. So a
chunk of rows is the product of the chunk, its scales, and the other matrix whole. Where one scale
is that of all tokens, it is computed from all of them before: then the region ends there.

Source: torch/_meta_registrations.py (``meta_scaled_mm``).
"""

from __future__ import annotations

import math

from torch import fx

from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import WHOLE, Refusal, Spec

_ROWS, _COLUMNS = (0,), (1,)
_BLOCKS = "float8 scales of blocks: their layout does not follow the rows"
_CONTRACTED = "sums float8 products over the tokens, with scales that all tokens decide"


def scaled_forward(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
    left, right, of_left, of_right = node.args[:4]
    if not _by_row_or_tensor(node):
        return Refusal(_BLOCKS)
    if operand in (left, of_left) and spec == _ROWS:
        return _ROWS
    if operand in (right, of_right) and spec == _COLUMNS:
        return _COLUMNS
    return Refusal(_CONTRACTED)


def scaled_backward(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    needs: OperandSpecs = dict.fromkeys(node.all_input_nodes, WHOLE)
    if not spec:
        return needs
    if len(spec) > 1:
        return Refusal("a matmul has tokens in several dims")
    if not _by_row_or_tensor(node):
        return Refusal(_BLOCKS)
    matrix, scale = (node.args[0], node.args[2]) if spec == _ROWS else (node.args[1], node.args[3])
    assert isinstance(matrix, fx.Node) and isinstance(scale, fx.Node), "both are nodes"
    needs[matrix] = spec
    if math.prod(shape_of(scale)) != 1:
        needs[scale] = spec
    return needs


def _by_row_or_tensor(node: fx.Node) -> bool:
    """Whether each scale is one element, or one for each row of the left or column of the right."""
    rows, columns = shape_of(node)
    shapes = [tuple(shape_of(s)) for s in node.args[2:4] if isinstance(s, fx.Node)]
    expected = ((rows, 1), (1, columns))
    return all(
        math.prod(shape) == 1 or shape == rowwise
        for shape, rowwise in zip(shapes, expected, strict=True)
    )
