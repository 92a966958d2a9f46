"""Attention of a sequence that ranks share, by the method that fits its heads."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor

from mstpass.sequences.ranks import Group, Ranks, ranks_of
from mstpass.sequences.ring import ring, ring_takes
from mstpass.sequences.rules import Rules
from mstpass.sequences.ulysses import heads_divide, ulysses

Method = Literal["auto", "ulysses", "ring"]
METHODS = ("auto", "ulysses", "ring")


def sequence_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    method: Method = "auto",
    head_groups: int = 1,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of a sequence whose tokens several ranks share.

    Each of R ranks gives its S / R tokens, in the order of the ranks, and gets the result for them.

    Args:
        query: ``[B, H, S / R, D]``.
        key: ``[B, K, S / R, D]``; K divides H, and K < H are grouped queries.
        value: as the keys.
        group: the ranks: a process group, a device mesh of one dim, or of two (a ring of rows that
            exchange heads), or None for all ranks.
        is_causal: whether a token sees those before it alone.
        window: a token sees those less than so many places away.
        softcap: scores s become ``softcap * tanh(s / softcap)``.
        sinks: ``[H]``, of each head the score of a key that is not there and whose value is 0.
        documents: ``int [B, S]``, of the *whole* sequence: tokens of different numbers do not see
            each other. ``shard_sequence`` computes them.
        method: ``"ulysses"`` exchanges heads for tokens, ``"ring"`` sends keys and values round;
            ``"auto"`` takes the first if the ranks divide the heads.
        head_groups: Ulysses runs for so many groups of heads, one after the other: less memory, in
            more and smaller exchanges.

    Raises:
        ValueError: the method cannot take these heads or these rules, or shapes do not fit.
    """
    _check_shapes(query, key, value)
    ranks = ranks_of(group)
    if documents is not None:
        documents = whole_documents(documents, query, ranks)
    rules = Rules(is_causal, scale, dropout_p, window, softcap, documents, sinks)
    split = Split(method, head_groups)
    mixed_BsHD = attention_of_ranks(query, key, value, ranks, rules, split)
    return mixed_BsHD.transpose(1, 2)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
    given = f"attention got queries, keys and values of {shapes}"
    if any(x.dim() != 4 for x in (query, key, value)):
        raise ValueError(f"{given}, and takes [B, heads, S / R, D]")
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise ValueError(f"{given}: a rank has as many keys and values as queries")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"{given}: key-value heads divide the heads of queries")


@dataclasses.dataclass(frozen=True)
class Split:
    """How ranks share the attention of a sequence.

    Attributes:
        head_groups: groups of heads, for which Ulysses runs one after the other.
    """

    method: Method = "auto"
    head_groups: int = 1

    def exchanges_heads(self, heads: int, ranks: Ranks) -> bool:
        """Whether ranks exchange so many heads: Ulysses, also of the rows of a mesh of two dims.

        Raises:
            ValueError: an argument is unknown, or the heads do not divide.
        """
        groups = self.head_groups
        if self.method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}, not {self.method!r}")
        if type(groups) is not int or groups < 1:
            raise ValueError(f"head_groups is a number of groups of heads, not {groups!r}")
        if ranks.row is not None and self.method != "auto":
            raise ValueError(
                f"a mesh of two dims has both methods, a ring of rows that exchange heads: leave "
                f"method={self.method!r} out, or give one dim of it"
            )
        if self.method == "ring" and groups > 1:
            raise ValueError(
                f"head_groups={groups} is for Ulysses, and method='ring' exchanges no heads: leave "
                "one of them out"
            )
        size = ranks.size if ranks.row is None else ranks.row.size
        divide = heads_divide(heads, size)
        if not divide and (self.method == "ulysses" or groups > 1 or ranks.row is not None):
            raise ValueError(
                f"{heads} attention heads do not divide among {size} ranks: take a number of "
                "ranks that divides them, or method='ring'"
            )
        if divide and not heads_divide(heads, size, groups):
            raise ValueError(
                f"{heads} attention heads on {size} ranks are {heads // size} a rank, which do "
                f"not divide into head_groups={groups}"
            )
        return divide and self.method != "ring"


def attention_of_ranks(
    query_BHsD: Tensor,
    key_BKsD: Tensor,
    value_BKsD: Tensor,
    ranks: Ranks,
    rules: Rules,
    split: Split,
) -> Tensor:
    """This rank's tokens after attention to the whole sequence, ``[B, s, H, D]``."""
    heads = query_BHsD.shape[1]
    inputs = query_BHsD, key_BKsD, value_BKsD
    exchanges_heads = split.exchanges_heads(heads, ranks)
    if not exchanges_heads or ranks.ring is not None:
        ring_takes(rules, heads, ranks)
    if exchanges_heads:
        return ulysses(*inputs, ranks, rules, split.head_groups)
    return ring(*inputs, ranks, rules)


def whole_documents(documents: Tensor, query_BHsD: Tensor, ranks: Ranks) -> Tensor:
    """The documents of the whole sequence, ``[B, S]``, as ``shard_sequence`` gives them.

    Raises:
        ValueError: they are of another length, or a mask in the place of numbers.
    """
    tokens = query_BHsD.shape[2] * ranks.size
    if documents.dim() == 4:
        documents = documents.flatten(1)
    if documents.is_floating_point() or documents.shape[-1] != tokens or documents.dim() != 2:
        raise ValueError(
            f"attention of {tokens} tokens on {ranks.size} ranks got a mask of "
            f"{list(documents.shape)} in {documents.dtype}, and takes the number of each token's "
            "document, integers [B, S], of the whole sequence: let mstpass.shard_sequence make the "
            "batch"
        )
    return documents
