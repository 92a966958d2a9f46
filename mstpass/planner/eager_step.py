"""An eager step's memory: the step itself, run on fake tensors, its storages counted.

Eager frees a tensor when nothing refers to it any more, so there is no plan to simulate: forward,
backward, checkpoints and hooks run as they are, on tensors without data. A storage counts from the
op that makes it until it is collected; attention adds its workspace while its backward runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.planner.accounting import Parts, Training
from mstpass.planner.allocator_replay import Event, Stepped
from mstpass.planner.models import build, workspace_bytes
from mstpass.torch_internals.dispatch_modes import TorchDispatchMode, storage_key
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.pytrees import tree_leaves

Loss = Callable[[Tensor], Any]  # of token ids (B, S): a loss, or what has one in ``.loss``
Recipe = Callable[[nn.Module], Loss]

_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_GRADIENTS, _LOGITS, _OTHER = "gradients", "logits", "other"


@dataclasses.dataclass(frozen=True)
class EagerStep:
    """What a step holds at its peak, and the order in which it allocates and frees."""

    parts: Parts
    events: tuple[Event | Stepped, ...]


def eager_step(config: Any, training: Training, recipe: Recipe, length: int) -> EagerStep:
    """A step of sequences of ``length``."""
    with FakeTensorMode():
        model = build(config, training)
        ids_BS = torch.zeros(training.batch, length, dtype=torch.long)
        memory = _Memory(model, config.vocab_size)
        if training.optimizer_in_backward or training.gradients_divided:
            share = 0.0 if training.optimizer_in_backward else 1 / training.ranks
            memory.drop_gradients(model, share)
        loss_of = recipe(model)
        with memory:
            with _autocast(training):
                found = loss_of(ids_BS)
            memory.in_backward()
            loss: Tensor = found if isinstance(found, Tensor) else found.loss
            loss.backward()
        return EagerStep(memory.parts, tuple(memory.events))


def _autocast(training: Training) -> contextlib.AbstractContextManager[Any]:
    if training.dtype == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class _Storage:
    bytes: int
    kind: str
    number: int  # in order of birth


class _Memory(TorchDispatchMode):
    """Counts the storages that ops make. What exists when it is made does not count."""

    def __init__(self, model: nn.Module, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._see_gradient)
        self.with_vocabulary = {tuple(p.shape) for p in parameters if vocabulary in p.shape}
        before = (storage_key(t.untyped_storage()) for t in (*parameters, *model.buffers()))
        self.alive = {key: _Storage(0, _OTHER, -1) for key in before}
        self.now_bytes = self.peak_bytes = self.born = 0
        self.at_peak: list[_Storage] = []
        self.inner_bytes = 0  # of the op at the peak
        self.events: list[Event | Stepped] = []
        self.kept: set[int] = set()  # what is alive between forward and backward

    def in_backward(self) -> None:
        """Forward is over."""
        self.kept = {storage.number for storage in self.alive.values()}

    def drop_gradients(self, model: nn.Module, share: float) -> None:
        """Free each gradient once it is whole, but for a share of it."""

        def dropped(number: int, parameter: Tensor) -> None:
            assert parameter.grad is not None
            if share:
                self._add(f"shard {self.born}", int(share * parameter.grad.nbytes), _GRADIENTS)
            else:
                self.events.append(Stepped(number))
            parameter.grad = None

        for number, parameter in enumerate(model.parameters()):
            hook = functools.partial(dropped, number)
            parameter.register_post_accumulate_grad_hook(hook)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        inner_bytes = workspace_bytes(args[1], args[2]) if func is _FLASH_BACKWARD else 0
        if inner_bytes:
            name = f"workspace {len(self.events)}"
            self.events += [Event(name, inner_bytes), Event(name, None)]
        if self.now_bytes + inner_bytes > self.peak_bytes:
            self.peak_bytes = self.now_bytes + inner_bytes
            self.at_peak, self.inner_bytes = list(self.alive.values()), inner_bytes
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self.alive:
            return
        self._add(key, storage.nbytes(), self._kind(tensor))
        weakref.finalize(storage, self._free, key).atexit = False

    def _see_gradient(self, parameter: Tensor) -> None:
        """It is whole, which the shape does not tell: a tile can be as large as a weight."""
        assert parameter.grad is not None
        key = storage_key(parameter.grad.untyped_storage())
        self.alive[key] = dataclasses.replace(self.alive[key], kind=_GRADIENTS)

    def _kind(self, tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        if shape in self.with_vocabulary or shape[::-1] in self.with_vocabulary:
            return _GRADIENTS
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        return _LOGITS if is_logits else _OTHER

    def _add(self, key: Any, size: int, kind: str) -> None:
        self.alive[key] = _Storage(size, kind, self.born)
        self.events.append(Event(self.born, size))
        self.born += 1
        self.now_bytes += size

    def _free(self, key: int) -> None:
        storage = self.alive.pop(key)
        self.events.append(Event(storage.number, None))
        self.now_bytes -= storage.bytes

    @property
    def parts(self) -> Parts:
        def total(kind: str, kept: bool) -> int:
            found = (s for s in self.at_peak if s.kind == kind and (s.number in self.kept) == kept)
            return sum(s.bytes for s in found)

        return Parts(
            gradients=total(_GRADIENTS, True) + total(_GRADIENTS, False),
            saved=total(_OTHER, True),
            logits=total(_LOGITS, True) + total(_LOGITS, False),
            other=total(_OTHER, False) + self.inner_bytes,
        )
