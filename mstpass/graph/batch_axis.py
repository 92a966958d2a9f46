"""Rows of the batch: what each row computes by itself, attention included.

A row of the batch is held as a head is (heads.py): along one dim, the first of most values, with
as many elements in a row as a view has merged behind it. ``[B, N, D]`` has ``HeadDim(0, 1)``, and
``[B * N, D]``, of which a product computes its rows, has ``HeadDim(0, N)``. Attention computes each
row of the batch by itself, with all of its heads. Reasons that are shared speak of heads.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from mstpass.graph.advice import ROWWISE
from mstpass.graph.attention import Held, is_flex
from mstpass.graph.heads import HeadAxis
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.tokens import Refusal

BLOCK_MASK = ROWWISE("FlexAttention's scores and masks may depend on the row of the batch")


@dataclasses.dataclass(frozen=True)
class BatchAxis(HeadAxis):
    """Rows of the batch, of which each value has ``num_heads``."""

    def dim_of(self, held: Held) -> int | None:
        return held.batch

    def dim_in(self, attention: fx.Node) -> int:
        return 0

    def attention_operands(self, node: fx.Node) -> OperandSpecs | Refusal:
        if is_flex(node):
            return Refusal(BLOCK_MASK)
        return super().attention_operands(node)
