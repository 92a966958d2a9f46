"""Attention masks that are bands around the diagonal, by proof.

A *band* allows query ``i`` the keys ``i - left <= j <= i + right``; None is no bound. So ``(None,
None)`` allows all, ``(None, 0)`` is causal, and ``(w - 1, 0)`` is a sliding window of ``w`` keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mstpass.graph.positions.inequalities import Constraints, impossible, negated
from mstpass.graph.positions.pieces import Pieces, Shape, broadcast, domain
from mstpass.graph.positions.polynomials import Poly, TooComplicated, index

FORBIDDEN = -1e30  # an added number that is less makes a weight exactly 0, in every dtype


@dataclass(frozen=True)
class Band:
    left: int | None = None
    right: int | None = None

    @property
    def is_all(self) -> bool:
        return self == Band()

    @property
    def is_causal(self) -> bool:
        return self == Band(None, 0)

    def __str__(self) -> str:
        if self.is_all:
            return "all true"
        if self.is_causal:
            return "causal"
        return f"a window of {self.left} keys before and {self.right} after each query"


def band_of(mask: Pieces, dtype: torch.dtype, shape: Shape) -> Band | str:
    """The band that a mask is, or why it is none.

    Args:
        mask: booleans, true for keys that a query may read, or numbers that are added to scores.
        shape: that of the scores, ``[..., queries, keys]``.
    """
    try:
        parts = _allowed(broadcast(mask, shape), dtype)
    except TooComplicated as error:
        return str(error)
    room = domain(shape)
    if impossible(room) or not any(allowed for _, allowed in parts):
        return "it allows no key"
    offset = index(len(shape) - 1) - index(len(shape) - 2)  # the key's position from the query's
    for band in _candidates([where for where, allowed in parts if allowed], offset):
        inside = _inside(band, offset)
        if all(
            all(impossible(room | where | {negated(bound)}) for bound in inside)
            if allowed
            else impossible(room | where | inside)
            for where, allowed in parts
        ):
            return band
    return "it is no band around the diagonal"


def _allowed(mask: Pieces, dtype: torch.dtype) -> list[tuple[Constraints, bool]]:
    """The parts of a mask, each with whether it allows its keys."""
    found = []
    for part in mask.parts:
        number = part.number.constant if isinstance(part.number, Poly) else part.number
        if dtype is torch.bool:
            allowed = number == 1
        elif number == 0:
            allowed = True
        elif number is not None and number <= FORBIDDEN:
            allowed = False
        else:
            raise TooComplicated(f"it adds {part.number} to scores")
        found.append((part.where, allowed))
    return found


def _inside(band: Band, offset: Poly) -> frozenset[Poly]:
    bounds = []
    if band.left is not None:
        bounds.append(offset.plus(band.left))
    if band.right is not None:
        bounds.append((-offset).plus(band.right))
    return frozenset(bounds)


def _candidates(allowed: list[Constraints], offset: Poly) -> Iterator[Band]:
    """The bands that the constraints of a mask name, the simplest first."""
    lefts: dict[int | None, None] = {None: None}
    rights: dict[int | None, None] = {None: None, 0: None}
    for constraint in sorted({c for where in allowed for c in where}, key=str):
        for found, direction in ((lefts, offset), (rights, -offset)):
            number = (constraint - direction).constant
            if number is not None:
                found[number] = None
    for left, right in itertools.product(lefts, rights):
        yield Band(left, right)
