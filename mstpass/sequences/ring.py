"""Ring attention: to be written."""

from __future__ import annotations

from torch import Tensor

from mstpass.sequences.ranks import Ranks
from mstpass.sequences.rules import Rules


def ring_takes(
    rules: Rules, documents_BS: Tensor | None, sinks_H: Tensor | None, heads: int, ranks: int
) -> None:
    raise ValueError(f"{heads} attention heads do not divide among {ranks} ranks")


def ring(q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, rules: Rules) -> Tensor:
    raise NotImplementedError
