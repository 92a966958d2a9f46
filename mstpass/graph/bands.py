"""Attention masks that follow from positions alone and are bands around the diagonal.

A *band* allows query ``i`` the keys ``i - left <= j <= i + right``; None is no bound. So ``(None,
None)`` allows all, ``(None, 0)`` is causal, and ``(w - 1, 0)`` is a sliding window of ``w`` keys.

The first and the last query say which band a mask may be. Whether it is that one, all its tiles
say: one that the mask, or the band, divides is divided itself (tiles.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mstpass.graph.joint import JointGraph
from mstpass.graph.sizes import hint_shape, is_bounded
from mstpass.graph.tiles import Bounds, Computed, NotComputed, Tiles
from mstpass.torch_internals.fake_tensors import unset_fake_temporarily

FORBIDDEN = -1e30  # an added number that is less makes a weight exactly 0, in every dtype
_MOST_TILES = 2**25  # a few seconds


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

    def allows(self, offsets: Bounds) -> Bounds:
        """Whether all, and whether any, keys of tiles are in the band."""
        low, high = offsets
        left = -math.inf if self.left is None else -self.left
        right = math.inf if self.right is None else self.right
        return (low >= left) & (high <= right), (high >= left) & (low <= right)


def band_of(joint: JointGraph, mask: fx.Node, query: Tensor, key: Tensor) -> Band | str:
    """The band that a mask is, or why it is none; an empty reason if it depends on data.

    Args:
        mask: booleans, true for keys that a query may read, or numbers that are added to scores.
    """
    shape = hint_shape(query)[-2], hint_shape(key)[-2]
    with unset_fake_temporarily():
        try:
            computed = Computed(joint, mask, shape)
            if not (is_bounded(query) and is_bounded(key)):
                return "its sizes have no bound"
            band = _candidate(computed, shape)
            return (
                band
                if band and _is_band(computed, shape, band)
                else "it is no band around the diagonal"
            )
        except NotComputed as why:
            return str(why)


def _candidate(mask: Computed, shape: tuple[int, int]) -> Band | None:
    """What the first and the last query may read, as a band; None if the last one reads nothing."""
    queries, keys = shape
    columns = torch.arange(keys, device="cpu")
    first, last = (
        _allowed(mask, Tiles(torch.full_like(columns, row), columns, 1))[1].nonzero().flatten()
        for row in (0, queries - 1)
    )
    if not len(last):
        return None
    left = queries - 1 - int(last[0])
    right = int(first[-1]) if len(first) else int(last[-1]) - (queries - 1)
    return Band(left if last[0] else None, right if right < keys - 1 else None)


def _is_band(mask: Computed, shape: tuple[int, int], band: Band) -> bool:
    """Whether all tiles are the same in the mask and in the band."""
    waiting, left = [Tiles.whole(shape)], _MOST_TILES
    while waiting and left > 0:
        tiles = waiting.pop()
        left -= len(tiles.rows)
        all_read, any_read = _allowed(mask, tiles)
        all_within, any_within = band.allows(tiles.offsets(shape))
        if bool((all_read & ~any_within | all_within & ~any_read).any()):
            return False
        open_ones = ~(all_read & all_within | ~any_read & ~any_within)
        if not open_ones.any():
            continue
        if tiles.edge == 1:  # a number that neither allows its key nor forbids it
            return False
        waiting += tiles.parts(open_ones, shape)
    return not waiting


def _allowed(mask: Computed, tiles: Tiles) -> Bounds:
    """Whether all, and whether any, elements of tiles allow a key."""
    low, high = mask.bounds(tiles)
    if low.dtype is torch.bool:
        return low, high
    return (low == 0) & (high == 0), high > FORBIDDEN
