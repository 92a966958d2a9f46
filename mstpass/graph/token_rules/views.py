"""Token rules of pointwise ops, of ops that create values, and of views.

Views here have all elements of their operand: view, expand, items. (``permute`` moves dims,
``select`` and ``unbind`` drop one and ``slice`` shortens one: see along_dims.py.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from mstpass.graph.advice import ROWWISE, SEPARATE_DIMS
from mstpass.graph.token_rules import OperandSpecs, Place, Places, Rule
from mstpass.graph.token_rules.arguments import shape_of, tensor_inputs
from mstpass.graph.tokens import Refusal, Spec, through_view


def aligned(source: Sequence[int], target: Sequence[int]) -> list[Place]:
    """The places of dims that are broadcast, counted from the right."""
    first = len(target) - len(source)
    broadcast = SEPARATE_DIMS("an operand is broadcast over the token dims")
    return [d + first if size == target[d + first] else broadcast for d, size in enumerate(source)]


def _broadcast(node: fx.Node) -> Places:
    return [(n, aligned(shape_of(n), shape_of(node))) for n in tensor_inputs(node)]


def _as_operand(node: fx.Node) -> Places:
    return [(n, range(len(shape_of(n)))) for n in tensor_inputs(node)]


pointwise = Rule(_broadcast, free=True)  # and ``expand``
item = Rule(_as_operand)
created = Rule(_as_operand, free=True)  # by its shape, or by that of another value: ``full_like``
# A chunk of token numbers is not the iota of a chunk.
numbered = Rule(lambda node: [], ROWWISE("{} numbers its elements along a token dim"))


@dataclasses.dataclass(frozen=True)
class ThroughView:
    """The rules of views by a shape.

    Attributes:
        drops_ones: it drops all dims of size 1, as a chunk's leading token dims are.
    """

    drops_ones: bool = False

    def forward(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Refusal:
        return through_view(shape_of(operand), shape_of(node), spec)

    def backward(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        if self.drops_ones and len(spec) > 1:
            reason = f"{node.target} without dims would drop the token dims of a chunk"
            return Refusal(ROWWISE(reason))
        operand = node.all_input_nodes[0]
        source = through_view(shape_of(node), shape_of(operand), spec)
        return source if isinstance(source, Refusal) else {operand: source}
