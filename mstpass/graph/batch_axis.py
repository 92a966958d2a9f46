"""Rows of the batch: what each row computes by itself, attention included.

A row of the batch is held as a head is (heads.py): along one dim, the first of most values, with
as many elements in a row as a view has merged behind it. ``[B, N, D]`` has ``HeadDim(0, 1)``, and
``[B * N, D]``, of which a product computes its rows, has ``HeadDim(0, N)``. Attention computes each
row of the batch by itself, with all of its heads.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from torch import fx

from mstpass.graph.advice import ROWWISE
from mstpass.graph.attention import Held, is_flex
from mstpass.graph.heads import HeadAxis
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import Reduced, Refusal, Spec

T = TypeVar("T")
BLOCK_MASK = ROWWISE("FlexAttention's scores and masks may depend on the row of the batch")


@dataclasses.dataclass(frozen=True)
class BatchAxis(HeadAxis):
    """Rows of the batch, of which each value has ``num_heads``."""

    def dim_of(self, held: Held) -> int | None:
        return held.batch

    def dim_in(self, attention: fx.Node) -> int:
        return 0

    def result_spec(self, node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
        return _of_rows(super().result_spec(node, operand, spec))

    def operand_specs(self, node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
        return _of_rows(super().operand_specs(node, spec))

    def attention_operands(self, node: fx.Node) -> OperandSpecs | Refusal:
        if is_flex(node):
            return Refusal(BLOCK_MASK)
        return super().attention_operands(node)


def _of_rows(found: T | Refusal) -> T | Refusal:
    """The same; a reason that speaks of heads does so of rows of the batch."""
    if not isinstance(found, Refusal) or "heads" not in found.reason:
        return found
    return Refusal(ROWWISE(found.reason.replace("heads", "rows of the batch")))
