"""An eager training step's memory: the step itself, run on fake tensors, its storages counted.

Eager frees a tensor when nothing refers to it any more, so there is no plan to simulate. Forward,
backward, checkpoints and hooks run as they are, on tensors without data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.integrations.transformers_masks import no_positions_given
from mstpass.planner.allocator_replay import Event, OptimizerStep
from mstpass.planner.models import build
from mstpass.planner.result import Parts
from mstpass.planner.storage_counter import StorageCounter
from mstpass.planner.training import Training
from mstpass.torch_internals.fake_tensors import FakeTensorMode

Loss = Callable[[Tensor], Any]  # token ids (B, S) to a loss, or to an object with a ``loss``
Recipe = Callable[[nn.Module], Loss]  # a way to train: may change the model, returns its loss


@dataclasses.dataclass(frozen=True)
class EagerStep:
    """The bytes that a step holds at its peak, and its allocations and frees in order."""

    parts: Parts
    events: tuple[Event | OptimizerStep, ...]


def eager_step(
    config: Any, training: Training, recipe: Recipe, length: int, layers: int | None = None
) -> EagerStep:
    """Run one step of ``training.batch`` sequences of ``length`` tokens on fake tensors.

    With ``layers``, the model has only so many of its layers.
    """
    with FakeTensorMode():
        model = build(config, training, layers)
        ids_BS = torch.zeros(training.batch, length, dtype=torch.long)
        counter = StorageCounter(model, config.vocab_size)
        if training.optimizer_in_backward or training.gradients_sharded:
            share = 0.0 if training.optimizer_in_backward else 1 / training.ranks
            counter.free_gradients(model, share)
        loss_of = recipe(model)
        with counter, no_positions_given(model):
            with _autocast(training):
                result = loss_of(ids_BS)
            counter.start_backward()
            loss: Tensor = result if isinstance(result, Tensor) else result.loss
            loss.backward()
        return EagerStep(counter.parts, tuple(counter.events))


def _autocast(training: Training) -> contextlib.AbstractContextManager[Any]:
    if training.dtype == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()
