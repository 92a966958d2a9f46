"""Token dims: which dimensions of a value run over tokens, and how they pass through ops.

Terms:
    *spec*: the token dims of a value, outermost first; their sizes multiply to the token count N.
        ``(0, 1)`` for ``[B, S, D]``, ``(0,)`` for ``[N, D]``, ``(1,)`` for a transposed ``[D, N]``.
        Dims of size 1 are left out. ``WHOLE``, the empty spec, marks a value that every chunk
        needs in full, such as a weight.
    *SUM*: a value that sums over all tokens; each chunk gives a partial sum of it.
    *chunk form*: a value with its token dims replaced by ``1, ..., 1, chunk``. Because an op that
        is token-parallel in (B, S) does not care how tokens are laid out over these dims, a
        chunk of the flattened tokens is a batch of one sequence of ``chunk`` tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from mstpass.graph.sizes import Size

Spec = tuple[int, ...]
WHOLE: Spec = ()


@dataclasses.dataclass(frozen=True)
class Sum:
    """Marker for a value summed over tokens."""


SUM = Sum()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an op, or a use of it, is not token-parallel."""

    reason: str


def token_count(shape: Sequence[int], spec: Spec) -> int:
    count = 1
    for dim in spec:
        count *= shape[dim]
    return count


def chunk_shape(shape: Sequence[int], spec: Spec, chunk_tokens: Size) -> list[Any]:
    """The shape of one chunk of a value: ``[B, S, D]`` with spec ``(0, 1)`` -> ``[1, c, D]``."""
    result: list[Any] = list(shape)
    for dim in spec:
        result[dim] = 1
    if spec:
        result[spec[-1]] = chunk_tokens
    return result


def align(spec: Spec, from_rank: int, to_rank: int) -> Spec:
    """Dims as broadcasting sees them: counted from the right."""
    return tuple(dim + to_rank - from_rank for dim in spec)


def broadcast_source(
    in_shape: Sequence[int], out_shape: Sequence[int], spec: Spec
) -> Spec | Refusal:
    """The spec an operand must have so that the broadcast result has ``spec``."""
    dims = align(spec, len(out_shape), len(in_shape))
    present = [d for d in dims if d >= 0 and in_shape[d] != 1]
    if not present:
        return WHOLE
    if len(present) < len(dims):
        return Refusal("an operand broadcasts over a part of the token dims")
    return dims


def through_view(in_shape: Sequence[int], out_shape: Sequence[int], spec: Spec) -> Spec | Refusal:
    """Token dims after a view, by matching groups of dims with equal products.

    ``[B, S, D] -> [B*S, D]`` maps ``(0, 1)`` to ``(0,)`` and back; a view that mixes token dims
    with others (``[N, D] -> [N*D]``) is refused.
    """
    if not spec:
        return WHOLE
    result: list[int] = []
    seen: set[int] = set()
    for dim in spec:
        if dim in seen:
            continue
        ins, outs = _group_of(in_shape, out_shape, dim)
        if not outs or any(i not in spec for i in ins):
            return Refusal("a view mixes token dims with other dims")
        if [d for d in spec if d in ins] != ins:
            return Refusal("a view merges token dims out of order")
        seen.update(ins)
        result.extend(outs)
    return tuple(result)


def _group_of(
    in_shape: Sequence[int], out_shape: Sequence[int], dim: int
) -> tuple[list[int], list[int]]:
    """The smallest matching groups (sizes > 1) of in and out dims that hold input dim ``dim``."""
    ins = [d for d, size in enumerate(in_shape) if size != 1]
    outs = [d for d, size in enumerate(out_shape) if size != 1]
    i = o = 0
    while i < len(ins) and o < len(outs):
        group_in, group_out = [ins[i]], [outs[o]]
        left, right = in_shape[ins[i]], out_shape[outs[o]]
        i, o = i + 1, o + 1
        while left != right:
            if left < right:
                if i == len(ins):
                    return [], []
                left *= in_shape[ins[i]]
                group_in.append(ins[i])
                i += 1
            else:
                if o == len(outs):
                    return [], []
                right *= out_shape[outs[o]]
                group_out.append(outs[o])
                o += 1
        if dim in group_in:
            return group_in, group_out
    return [], []


def without_ones(shape: Sequence[int], spec: Spec) -> Spec:
    return tuple(dim for dim in spec if shape[dim] != 1)


class CannotTake(Exception):
    """The region is refused; carries the node and the reason."""

    def __init__(self, node: fx.Node, reason: str):
        super().__init__(reason)
        self.node, self.reason = node, reason
