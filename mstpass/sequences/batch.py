"""A rank's part of a batch that all ranks of a sequence hold whole.

Losses are sums over a rank's tokens, divided by the number of labels of the whole batch. So they
are right for ranks with few labels, and for ranks with none, where a mean would be 0 / 0. The
gradients of all ranks, added up, are those of one process; where a wrapper takes their mean (DDP,
FSDP2), the number of labels is divided by the number of ranks.

A causal model's token i predicts token i + 1. Labels are shifted before they are cut: the last
token of a part then has its label too, the first token of the next part.

**Documents.** Which one each token of a batch belongs to follows from what data collators give.
Padding is document `PADDING`. Documents need numbers only where attention would mix them: a batch
of one document a row, padded on the right or not at all, needs none under causal attention, because
no query sees what comes behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mstpass.sequences.ranks import Group, Ranks, ranks_of, sum_over
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


IGNORED = -100  # the label of a token without one
_LABELS, _SHIFTED, _COUNT = "labels", "shift_labels", "num_items_in_batch"
_PLACES = ("attention_mask", "position_ids", *OF_COLLATORS)  # what says where texts begin
_OWN = ("attention_mask", "position_ids", _LABELS, _SHIFTED, _COUNT, *OF_COLLATORS)


def shard_sequence(
    batch: Mapping[str, Any],
    group: Group = None,
    data_group: Group = None,
    gradients: Literal["mean", "sum"] = "mean",
    *,
    causal: bool = True,
    num_items_in_batch: int | Tensor | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """This rank's part of a batch that all ranks of ``group`` hold whole.

    Every tensor of ``[B, S, ...]`` is cut along S, which is padded to a multiple of the ranks where
    no token sees it. Other values stay as they are. Beside them the result has

    - ``position_ids``: those of this rank's tokens, as given, or 0, 1, ..., S - 1;
    - ``labels``, and for a causal model ``shift_labels``, which are the labels that count, each at
      the token that predicts it. Padding has none, and predicts none;
    - ``num_items_in_batch``: what the sum of this rank's losses is to be divided by. transformers'
      losses do so. The loss of the whole batch is the sum of all ranks' losses, or their mean
      under ``gradients="mean"``;
    - ``attention_mask``, if attention needs one: the document of each token of the whole sequence,
      ``int32 [B, 1, 1, S]``, with -1 for padding. ``sequence_parallel`` knows it.

    Args:
        batch: ``input_ids`` or ``inputs_embeds``, and what a data collator puts beside them:
            ``labels``, ``attention_mask`` (1 for tokens, 0 for padding), ``position_ids`` (a
            document starts where they start again), ``seq_idx``, ``cu_seq_lens_q``.
        group: the ranks that share the sequence, as of ``sequence_parallel``.
        data_group: if other ranks have other sequences: the ranks with the same place in theirs
            (``mesh["data"]``), or all ranks together.
        gradients: how the ranks' gradients become one: ``"mean"`` as DDP and FSDP2 do, ``"sum"``.
        causal: False for encoders: labels are not shifted, and padding is hidden from all tokens.
        num_items_in_batch: the number of labels in all batches whose gradients are added up, where
            that is not this one's: of all micro-batches under gradient accumulation, of all ranks.
        check: compare the batches of all ranks, in a small exchange.

    Raises:
        ValueError: the ranks have different batches, or a value has a shape that is not known.
    """
    ranks, data = ranks_of(group), None if data_group is None else ranks_of(data_group)
    if gradients not in ("mean", "sum"):
        raise ValueError(f"gradients are 'mean' or 'sum', not {gradients!r}")
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a mapping of names to tensors, not a {type(batch).__name__}")
    if check:
        _check_alike(_tokens_of(batch), ranks)
        if causal:
            _check_left(batch)
    mine = _parts_by_token(batch, ranks, causal)
    labels = labels_that_count(batch, causal)
    if labels is not None:
        mine[_LABELS] = _part(labels, ranks, IGNORED)
        if causal:
            mine[_SHIFTED] = mine[_LABELS]
        given = batch.get(_COUNT) if num_items_in_batch is None else num_items_in_batch
        mine[_COUNT] = _divisor(labels, given, ranks, data, gradients)
    return {**{name: x for name, x in batch.items() if name not in _OWN}, **mine}


def _parts_by_token(batch: Mapping[str, Any], ranks: Ranks, causal: bool) -> dict[str, Any]:
    """This rank's parts of all but the labels, and the documents of the whole sequence."""
    tokens = _tokens_of(batch)
    shape = (tokens.shape[0], tokens.shape[1])
    positions = _positions(batch, tokens)
    documents = documents_of(batch, shape, causal)
    rest = -shape[1] % ranks.size
    if documents is None and rest and not causal:
        documents = torch.zeros(shape, dtype=torch.int32, device=tokens.device)
    mine = {
        name: _part(value, ranks)
        for name, value in batch.items()
        if name not in _OWN and isinstance(value, Tensor) and tuple(value.shape[:2]) == shape
    }
    mine["position_ids"] = _part(positions, ranks)
    if documents is not None:
        mine["attention_mask"] = F.pad(documents, (0, rest), value=PADDING)[:, None, None]
    return mine


def _tokens_of(batch: Mapping[str, Any]) -> Tensor:
    for name in ("input_ids", "inputs_embeds"):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    raise ValueError(
        "a batch needs input_ids [B, S] or inputs_embeds [B, S, D]; this one has "
        f"{sorted(map(str, batch))}"
    )


def _check_left(batch: Mapping[str, Any]) -> None:
    """Refuse what looks like padding on the left, where no mask says that it is.

    Causal attention sees it, other than padding on the right.
    """
    tokens, labels = batch.get("input_ids"), batch.get(_LABELS)
    if tokens is None or labels is None or any(batch.get(name) is not None for name in _PLACES):
        return
    same = (tokens[:, :2] == tokens[:, :1]) & (labels[:, :2] == IGNORED)
    padded = same.all(1)
    if tokens.shape[1] > 1 and padded.any():
        row = int(padded.int().argmax())
        raise ValueError(
            f"row {row} begins with tokens {int(tokens[row, 0])} that have no labels, as padding "
            "on the left does, and there is no attention_mask, so that attention would see it: "
            "put the mask into the batch, or one of ones if this is text"
        )


def _check_alike(tokens: Tensor, ranks: Ranks) -> None:
    """Refuse batches that differ, before ranks of different lengths wait for each other."""
    weights = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    of_token = tokens.detach().flatten(2).sum(-1) if tokens.dim() > 2 else tokens
    found = (of_token * weights).sum().to(torch.float64)
    mine = torch.stack(
        (found.new_tensor(tokens.shape[0]), found.new_tensor(tokens.shape[1]), found)
    )
    each = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(each, mine, group=ranks.group)
    other = next((rank for rank, theirs in enumerate(each) if not torch.equal(theirs, each[0])), 0)
    if other:
        rows, length, _ = each[0].tolist()
        other_rows, other_length, _ = each[other].tolist()
        raise ValueError(
            f"ranks {ranks.members[0]} and {ranks.members[other]} share a sequence and have "
            f"different batches, {rows:.0f} x {length:.0f} and {other_rows:.0f} x "
            f"{other_length:.0f} tokens: give all ranks of a sequence the same batch, for example "
            "by a sampler whose number of replicas is that of the data-parallel ranks"
        )


def labels_that_count(batch: Mapping[str, Any], causal: bool) -> Tensor | None:
    """Each token's label, at the token whose logits it is compared with. Padding has none."""
    shifted, mask = batch.get(_SHIFTED), batch.get("attention_mask")
    labels = batch.get(_LABELS) if shifted is None else shifted
    if labels is None:
        return None
    tokens = _tokens_of(batch)
    if labels.shape != tokens.shape[:2]:
        raise ValueError(
            f"labels are {list(labels.shape)}, and one for each token is needed, "
            f"{list(tokens.shape[:2])}, that token itself: shard_sequence shifts them"
        )
    if shifted is None and causal:
        labels = labels if mask is None else labels.masked_fill(mask == 0, IGNORED)
        labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return labels if mask is None else labels.masked_fill(mask == 0, IGNORED)


def _positions(batch: Mapping[str, Any], tokens: Tensor) -> Tensor:
    rows, length = tokens.shape[:2]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    if tuple(positions.shape) not in ((rows, length), (1, length)):
        raise ValueError(
            f"position_ids are {list(positions.shape)}, and one for each token is needed, "
            f"{[rows, length]}: positions of several dims (images, videos) are not known"
        )
    return positions.expand(rows, length)


def _part(value: Tensor, ranks: Ranks, filling: int = 0) -> Tensor:
    """This rank's part along dim 1, filled up to a multiple of the ranks."""
    behind = (*(0, 0) * (value.dim() - 2), 0, -value.shape[1] % ranks.size)
    return F.pad(value, behind, value=filling).chunk(ranks.size, 1)[ranks.rank].contiguous()


def _divisor(
    labels: Tensor,
    given: int | Tensor | None,
    ranks: Ranks,
    data: Ranks | None,
    gradients: str,
) -> Tensor:
    """The number of labels of all ranks, by the number of ranks where gradients are averaged.

    A rank of the data-parallel group has counted its own sequence's labels. If the group has all
    ranks of each sequence, each sequence's labels are counted once for each rank.
    """
    shared = 1 if data is None else len({*data.members} & {*ranks.members})
    if shared not in (1, ranks.size):
        raise ValueError(
            f"{shared} of the {ranks.size} ranks of a sequence are in its data group: give the "
            "ranks with the same place in their sequences, or all ranks"
        )
    if given is None:
        count = (labels != IGNORED).sum()
        if data is not None:
            count = sum_over(count, data) / shared
    else:
        count = torch.as_tensor(given, device=labels.device)
    if gradients == "mean":
        sequences = 1 if data is None else data.size // shared
        count = count / (ranks.size * sequences)
    return torch.where(count > 0, count, torch.ones_like(count))  # a batch without labels: 0 / 1
