"""An eager training step's memory: the step itself, run on fake tensors, its storages counted.

Eager frees a tensor when nothing refers to it any more, so there is no plan to simulate. Forward,
backward, checkpoints and hooks run as they are, on tensors without data.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.integrations.transformers_masks import no_positions_given
from mstpass.memory.allocation import allocated_bytes
from mstpass.memory.workspaces import eager_workspace_bytes
from mstpass.planner.models import build, layers_of
from mstpass.planner.request import Parts
from mstpass.planner.traced_step import part_of_rank
from mstpass.planner.training import Training
from mstpass.torch_internals.fake_tensors import FakeTensorMode, TorchDispatchMode, storage_key
from mstpass.torch_internals.graphs import tree_leaves

Loss = Callable[..., Any]  # token ids (B, S) to a loss, or to an object with a ``loss``
Recipe = Callable[[nn.Module], Loss]  # a way to train: may change the model, returns its loss


@dataclasses.dataclass(frozen=True)
class EagerStep:
    """The bytes that a step holds at its peak.

    Attributes:
        host_bytes: of inputs of layers that wait on the host.
    """

    parts: Parts
    host_bytes: int = 0


def eager_step(
    config: Any,
    training: Training,
    recipe: Recipe,
    length: int,
    layers: int | None = None,
    offload: bool = False,
) -> EagerStep:
    """Run one step of ``training.batch`` sequences on fake tensors.

    Args:
        length: tokens of a sequence, on one of the ranks that share it.
        layers: the model has only so many of its layers.
        offload: what a checkpointed layer keeps, its input, waits on the host.
    """
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        model = build(copy.deepcopy(config), training, layers)
        part: dict[str, Any] = {}
        if training.shares:
            part = stack.enter_context(part_of_rank(model, training, length, "cpu"))
            ids_BS = part.pop("input_ids")
        else:
            ids_BS = torch.zeros(training.batch, length, dtype=torch.long)
        counter = _StorageCounter(model, config.vocab_size)
        if training.optimizer_in_backward or training.gradient_shards > 1:
            share = 0.0 if training.optimizer_in_backward else 1 / training.gradient_shards
            counter.free_gradients(model, share)
        loss_of = recipe(model)
        if offload:
            counter.keep_on_host(layers_of(model))
        with counter, no_positions_given(model):
            autocast = training.dtype == "autocast"
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                result = loss_of(ids_BS, **part)
            counter.start_backward()
            loss: Tensor = result if isinstance(result, Tensor) else result.loss
            loss.backward()
        return EagerStep(counter.parts, counter.host_bytes)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# ---- storages ----------------------------------------------------------------------------------
_GPU = torch.device("cuda", 0)  # nothing runs there
_GRADIENTS, _LOGITS, _OTHER = "gradients", "logits", "other"  # as in `Parts`


@dataclasses.dataclass(frozen=True)
class _Storage:
    """``number`` counts storages in the order in which they were allocated."""

    bytes: int
    kind: str
    number: int


class _StorageCounter(TorchDispatchMode):
    """Follows the storages of a step, and keeps those that are alive at its peak.

    A storage counts from the op that allocates it until it is collected, with what it would take on
    a GPU. An op adds its workspace on a GPU while it runs.
    Parameters and buffers exist before the step and do not count.
    """

    def __init__(self, model: nn.Module, vocabulary: int):
        super().__init__()
        self.host_bytes = 0
        self._vocabulary = vocabulary
        parameters = list(model.parameters())
        for parameter in _trained(model):
            parameter.register_post_accumulate_grad_hook(self._see_gradient)
        self._weight_shapes = {tuple(p.shape) for p in parameters if vocabulary in p.shape}
        before = (storage_key(t.untyped_storage()) for t in (*parameters, *model.buffers()))
        self._alive = {key: _Storage(0, _OTHER, -1) for key in before}
        self._now_bytes = self._peak_bytes = self._allocated = 0
        self._at_peak: list[_Storage] = []
        self._workspace_bytes = 0  # of the op at the peak
        self._saved: set[int] = set()  # numbers of the storages alive when the forward ends

    def start_backward(self) -> None:
        """Tell the counter that the forward is over: what is alive now is saved."""
        self._saved = {storage.number for storage in self._alive.values()}

    def free_gradients(self, model: nn.Module, share: float) -> None:
        """Free each gradient when the backward has finished it, and keep ``share`` of its bytes."""

        def free(parameter: Tensor) -> None:
            assert parameter.grad is not None, "the grad is known"
            if share:
                key = f"shard {self._allocated}"
                self._add(key, int(share * parameter.grad.nbytes), _GRADIENTS)
            parameter.grad = None

        for parameter in _trained(model):
            parameter.register_post_accumulate_grad_hook(free)

    def keep_on_host(self, layers: Iterable[nn.Module]) -> None:
        """Let what autograd saves for these layers as a whole wait on the host."""

        def away(saved: Tensor) -> tuple[Any, ...]:
            self.host_bytes += saved.nbytes
            return saved.shape, saved.stride(), saved.dtype

        def back(kept: tuple[Any, ...]) -> Tensor:
            return torch.empty_strided(kept[0], kept[1], dtype=kept[2])

        def with_hooks(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(away, back):
                return forward(*args, **kwargs)

        for layer in layers:
            layer.forward = functools.partial(with_hooks, layer.forward)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        workspace = eager_workspace_bytes(func, args, kwargs or {}, _GPU)
        if self._now_bytes + workspace > self._peak_bytes:
            self._peak_bytes = self._now_bytes + workspace
            self._at_peak, self._workspace_bytes = list(self._alive.values()), workspace
        return out

    @property
    def parts(self) -> Parts:
        """Bytes that the step holds at its peak."""
        sizes = Counter({_OTHER: self._workspace_bytes})
        for storage in self._at_peak:
            is_saved = storage.kind == _OTHER and storage.number in self._saved
            sizes["saved" if is_saved else storage.kind] += storage.bytes
        return Parts(**sizes)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._alive:
            return
        self._add(key, allocated_bytes(storage.nbytes(), _GPU), self._kind(tensor))
        weakref.finalize(storage, self._free, key).atexit = False

    def _see_gradient(self, parameter: Tensor) -> None:
        """Count a finished gradient as one: a shape does not tell, a tile can be as large."""
        assert parameter.grad is not None, "the grad is known"
        key = storage_key(parameter.grad.untyped_storage())
        self._alive[key] = dataclasses.replace(self._alive[key], kind=_GRADIENTS)

    def _kind(self, tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        if shape in self._weight_shapes or shape[::-1] in self._weight_shapes:
            return _GRADIENTS
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        return _LOGITS if is_logits else _OTHER

    def _add(self, key: Any, size: int, kind: str) -> None:
        self._alive[key] = _Storage(size, kind, self._allocated)
        self._allocated += 1
        self._now_bytes += size

    def _free(self, key: int) -> None:
        storage = self._alive.pop(key)
        self._now_bytes -= storage.bytes
