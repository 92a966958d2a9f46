"""The step of a model that is traced: of one device, or of one of the ranks that share a sequence.

The ranks are those of `mstpass.sequence_parallel`, as a training script would call it; only their
process group is pretended. The last rank is planned: in a ring it has the most work, since its
queries see the keys of all others, and under Ulysses all ranks have the same.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.errors import UserError
from mstpass.integrations.transformers_masks import no_positions_given
from mstpass.planner.models import build
from mstpass.planner.training import Training
from mstpass.sequences import sequence_parallel, shard_sequence
from mstpass.torch_internals.pretended_ranks import NoPretendedRanks, pretended_ranks

_SHORTER = 0.99  # a length is rounded down to at least this fraction of it


class SequenceError(UserError):
    """The ranks cannot share the model's sequences."""


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A step to trace.

    Attributes:
        length: tokens of each sequence on this rank.
        loss_of: takes ``inputs``.
        device: all tensors stand for tensors there; None: the step runs where its tensors are.
    """

    length: int
    loss_of: Callable[..., Any]
    inputs: Mapping[str, Any]
    device: torch.device | None = None


@contextlib.contextmanager
def model_step(
    config: Any,
    training: Training,
    length: int,
    multiple: int | None = None,
    layers: int | None = None,
) -> Iterator[ModelStep]:
    """The step of a rank with ``length`` tokens of each sequence.

    Args:
        multiple: None: the step has just so many tokens. Otherwise about as many, a multiple of
            this number, that tell apart what has a row for each token (`distinct_length`).

    Raises:
        SequenceError: the ranks cannot share the model's sequences.
    """
    config = copy.deepcopy(config)  # sequence_parallel names its attention in it
    with torch.device("meta"):
        model = build(config, training, layers)
    if multiple is not None:
        length = distinct_length({n for p in model.parameters() for n in p.shape}, length, multiple)
    with (
        _shared(model, training, length)
        if training.shares
        else _own(model, training, length) as step
    ):
        yield step


@contextlib.contextmanager
def _own(model: nn.Module, training: Training, length: int) -> Iterator[ModelStep]:
    tied = model.config.get_text_config().tie_word_embeddings  # type: ignore[union-attr, operator]
    model = model.to_empty(device="cpu")  # reserved, never written
    if tied:
        model.tie_weights()  # type: ignore[operator]
    ids_BS = torch.zeros(training.batch, length, dtype=torch.long)
    loss_of = _loss(model, training, "cpu")
    with no_positions_given(model):  # as ``mstpass.compile(model)`` says
        yield ModelStep(length, lambda ids: loss_of(input_ids=ids, labels=ids), {"ids": ids_BS})


@contextlib.contextmanager
def _shared(model: nn.Module, training: Training, length: int) -> Iterator[ModelStep]:
    device = torch.device("cuda")
    with part_of_rank(model, training, length, "meta") as part:
        yield ModelStep(length, _loss(model, training, device.type), part, device)


@contextlib.contextmanager
def part_of_rank(
    model: nn.Module, training: Training, length: int, device: str
) -> Iterator[dict[str, Any]]:
    """The last rank's part of a batch, as keywords of a model that shares its sequences in here.

    Raises:
        SequenceError: the ranks cannot share the model's sequences.
    """
    ranks = training.sequence_ranks
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(pretended_ranks(ranks, ranks - 1))
            sequence_parallel(model, head_groups=training.head_groups)
        except (ValueError, NoPretendedRanks) as error:
            raise SequenceError(f"--sequence-parallel {ranks}: {error}") from error
        ids_BS = torch.zeros(training.batch, ranks * length, dtype=torch.long, device=device)
        yield shard_sequence({"input_ids": ids_BS, "labels": ids_BS}, check=False)


def _loss(model: nn.Module, training: Training, device: str) -> Callable[..., Any]:
    def loss_of(**batch: Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=training.dtype == "autocast"):
            return model(**batch).loss

    return loss_of


def distinct_length(dims: Collection[int], length: int, multiple: int) -> int:
    """A multiple near ``length`` that has a prime factor which no dim of a parameter has.

    The number of bytes of a value then tells whether the value has a row for each token.
    """

    def is_distinct(length: int) -> bool:
        rest, common = length, math.lcm(*dims)
        while (shared := math.gcd(rest, common)) > 1:
            rest //= shared
        return rest > 1

    start = max(multiple, length // multiple * multiple)
    shorter = range(start, int(_SHORTER * start), -multiple)
    longer = itertools.count(start + multiple, multiple)
    return next(n for n in itertools.chain(shorter, longer) if is_distinct(n))
