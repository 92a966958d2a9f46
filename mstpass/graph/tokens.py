"""Token dims: the dimensions of a value that run over tokens.

Terms:
    *token-parallel*: an op is token-parallel if each token of its result depends on the same token
        of its operands, and on no other token.
    *spec*: the token dims of a value, outermost first. Their sizes multiply to the token count N:
        ``(0, 1)`` for ``[B, S, D]``, ``(0,)`` for ``[N, D]``, ``(1,)`` for a transposed ``[D, N]``.
        Dims of size 1 are left out. ``WHOLE``, the empty spec, marks a value without tokens, such
        as a weight: every chunk reads it in full.
    *SUM*, *MAX*, *MIN*, *ANY*: mark a value that is reduced over all tokens. Every chunk gives a
        part of it; the parts are added up, or their maximum, minimum or disjunction is taken.
    *chunk form*: a value for one chunk of c tokens, with its token dims replaced by
        ``1, ..., 1, c``: ``[B, S, D]`` becomes ``[1, c, D]``. A token-parallel op treats the chunk
        as a batch of one sequence with c tokens, however B and S divide the tokens.

The token rules (token_rules/) say how specs pass through each op.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from mstpass.graph.advice import SEPARATE_DIMS
from mstpass.graph.sizes import Size

Spec = tuple[int, ...]
WHOLE: Spec = ()


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Marks a value that is reduced over all tokens.

    Attributes:
        combine: how the parts of chunks are combined, ``"sum"``, ``"max"``, ``"min"`` or ``"any"``.
    """

    combine: str


def has_tokens(spec: Spec | Reduced) -> bool:
    """Whether a value holds tokens: it is neither whole nor reduced over them."""
    return isinstance(spec, tuple) and spec != WHOLE


SUM, MAX, MIN, ANY = (Reduced(combine) for combine in ("sum", "max", "min", "any"))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The reason why an op is not token-parallel, or not in the given dims."""

    reason: str


def token_count(shape: Sequence[int], spec: Spec) -> int:
    """The number of tokens in a value of this shape."""
    return math.prod(shape[dim] for dim in spec)


def chunk_shape(shape: Sequence[Size], spec: Spec, chunk_tokens: Size) -> list[Any]:
    """The shape of one chunk of a value: ``[B, S, D]`` with spec ``(0, 1)`` -> ``[1, c, D]``."""
    result: list[Any] = list(shape)
    for dim in spec:
        result[dim] = 1
    if spec:
        result[spec[-1]] = chunk_tokens
    return result


def through_view(in_shape: Sequence[int], out_shape: Sequence[int], spec: Spec) -> Spec | Refusal:
    """The token dims after a view, found by matching groups of dims with equal products.

    ``[B, S, D] -> [B*S, D]`` maps ``(0, 1)`` to ``(0,)`` and back. A view that mixes token dims
    with others, such as ``[N, D] -> [N*D]``, is refused.
    """
    if not spec:
        return WHOLE
    result: list[int] = []
    seen: set[int] = set()
    for dim in spec:
        if dim in seen:
            continue
        ins, outs = group_of(in_shape, out_shape, dim)
        if not outs or any(i not in spec for i in ins):
            return Refusal(SEPARATE_DIMS("a view mixes token dims with other dims"))
        if [d for d in spec if d in ins] != ins:
            return Refusal(SEPARATE_DIMS("a view merges token dims out of order"))
        seen.update(ins)
        result.extend(outs)
    return tuple(result)


def group_of(
    in_shape: Sequence[int], out_shape: Sequence[int], dim: int
) -> tuple[list[int], list[int]]:
    """The smallest groups of dims of a view's operand and result that correspond, for one dim.

    The products of both groups are equal, and ``dim``, one of the operand's, is in the first one.

    Dims of size 1 belong to no group. Both groups are empty if the shapes do not match.
    """
    ins, outs = ([d for d, size in enumerate(s) if size != 1] for s in (in_shape, out_shape))
    while ins and outs:
        group_in, group_out = [ins.pop(0)], [outs.pop(0)]
        size_in, size_out = in_shape[group_in[0]], out_shape[group_out[0]]
        while size_in != size_out:
            if not (ins if size_in < size_out else outs):
                return [], []
            if size_in < size_out:
                group_in.append(ins.pop(0))
                size_in *= in_shape[group_in[-1]]
            else:
                group_out.append(outs.pop(0))
                size_out *= out_shape[group_out[-1]]
        if dim in group_in:
            return group_in, group_out
    return [], []


def without_ones(shape: Sequence[int], spec: Spec) -> Spec:
    """The spec without dims of size 1."""
    return tuple(dim for dim in spec if shape[dim] != 1)


class CannotTake(Exception):
    """A region is refused: the node that stands in the way, and the reason."""

    def __init__(self, node: fx.Node, reason: str):
        super().__init__(reason)
        self.node, self.reason = node, reason
