"""Which document each token of a batch belongs to, from what data collators give.

Padding is document `PADDING`. Documents need numbers only where attention would mix them: a batch
of one document a row, padded on the right or not at all, needs none under causal attention, because
no query sees what comes behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mstpass.sequences.rules import PADDING

# What FlashAttention takes in the place of positions, from transformers' DataCollatorWithFlattening
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
NUMBERS = "seq_idx"
OF_COLLATORS = (*LENGTHS, NUMBERS, "max_length_q", "max_length_k")


def documents_of(
    batch: Mapping[str, object], shape: tuple[int, int], causal: bool
) -> Tensor | None:
    """The document of each token, ``int32 [B, S]``; None where attention needs no numbers.

    Args:
        batch: of which ``attention_mask``, ``position_ids``, ``seq_idx`` and ``cu_seq_lens_q`` are
            read, if they are there.
        shape: B and S.

    Raises:
        ValueError: an attention mask that is not ``[B, S]``, or lengths that are not of one row.
    """
    mask = _tensor(batch, "attention_mask")
    if mask is not None and tuple(mask.shape) != shape:
        raise ValueError(
            f"the attention mask is {list(mask.shape)}, and one for each token is needed, "
            f"{list(shape)}: give documents by position_ids that start again, and padding by a "
            "mask of ones and zeros"
        )
    real = None if mask is None or bool(mask.bool().all()) else mask.bool()
    numbers = _numbers(batch, shape, real)
    if real is None:
        one = numbers is None or bool((numbers == numbers[:, :1]).all())
        return None if one else numbers
    if numbers is None:
        numbers = torch.zeros(shape, dtype=torch.int32, device=real.device)
    numbers = numbers.masked_fill(~real, PADDING)
    only_behind = not bool((real[:, 1:] & ~real[:, :-1]).any())
    one = bool(((numbers == numbers[:, :1]) | ~real).all())
    return None if causal and only_behind and one else numbers


def _numbers(
    batch: Mapping[str, object], shape: tuple[int, int], real: Tensor | None
) -> Tensor | None:
    """The numbers that the batch gives, whatever is at padding; None if it gives none."""
    given = _tensor(batch, NUMBERS)
    if given is not None:
        return given.expand(shape).to(torch.int32)
    lengths = next((x for name in LENGTHS if (x := _tensor(batch, name)) is not None), None)
    if lengths is not None:
        return _from_lengths(lengths, shape)
    positions = _tensor(batch, "position_ids")
    return None if positions is None else _from_positions(positions.expand(shape), real)


def _from_lengths(lengths: Tensor, shape: tuple[int, int]) -> Tensor:
    """From where documents start, ``[0, n_1, n_1 + n_2, ..., S]``."""
    if shape[0] != 1 or int(lengths[-1]) != shape[1]:
        raise ValueError(
            f"cu_seq_lens ends at {int(lengths[-1])}, and the batch has {shape[0]} rows of "
            f"{shape[1]} tokens: cumulative lengths are for one row, up to its last token"
        )
    place = torch.arange(shape[1], device=lengths.device, dtype=lengths.dtype)
    return torch.bucketize(place, lengths[1:], right=True).to(torch.int32)[None]


def _from_positions(positions_BS: Tensor, real_BS: Tensor | None) -> Tensor:
    """A document starts where a position is not the next one, as transformers has it.

    Among padding, collators number tokens in several ways. There a document starts where a token's
    position is not behind those of the real tokens before it.
    """
    if real_BS is None:
        starts = positions_BS.diff(dim=1) != 1
        return F.pad(starts, (1, 0)).cumsum(1).to(torch.int32)
    place = torch.arange(positions_BS.shape[1], device=positions_BS.device)
    last_real_BS = torch.where(real_BS, place, -1).cummax(1).values
    before_BS = F.pad(last_real_BS, (1, 0), value=-1)[:, :-1]  # -1: there is none
    position_before_BS = positions_BS.gather(1, before_BS.clamp_min(0))
    starts_BS = real_BS & (before_BS >= 0) & (positions_BS <= position_before_BS)
    return starts_BS.cumsum(1).to(torch.int32)


def _tensor(batch: Mapping[str, object], name: str) -> Tensor | None:
    value = batch.get(name)
    return value if isinstance(value, Tensor) else None
