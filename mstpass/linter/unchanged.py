"""What the linter runs leaves everything as it was, also where it raises an error.

Kept are, of all that the step is, holds, uses or is given: the values of tensors, gradients,
``requires_grad``; modules' attributes (buffers, ``training``, hooks); optimizers, schedulers and
scalers; and random states. Not kept is what no tensor, module or optimizer knows: a data loader's
position, files, lists of one's own.

A tensor is copied when an op is about to write to it, so that a step that writes to no weight needs
no copy of one. Buffers are copied before: batch norms write to theirs unseen. Gradients are added
to copies, as autograd adds them unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mstpass.torch_internals.fake_tensors import TorchDispatchMode, storage_key
from mstpass.torch_internals.graphs import OpOverload, schema_of, tree_leaves
from mstpass.torch_internals.modules import contents_kept, fsdp_containers
from mstpass.tracing.fake_tensors import modules_of, tensor_places
from mstpass.tracing.joint_graphs import random_numbers_kept

_CONTAINERS = (dict, list, set)


@contextmanager
def unchanged(step: Any, follow_writes: bool) -> Iterator[None]:
    """Whatever runs in here changes nothing of a step.

    Args:
        step: a tree of functions, modules and arguments.
        follow_writes: copy tensors when ops write to them, which no compiled function may run
            under. Otherwise all are copied at once, to the memory of the host.
    """
    leaves = tree_leaves(step)
    values = [*leaves, *(value for value, _ in tensor_places(leaves))]
    modules = modules_of(step)
    with ExitStack() as undo:
        kept = _Kept(undo, follow_writes)
        undo.enter_context(random_numbers_kept(v for v in values if isinstance(v, torch.Generator)))
        undo.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        undo.enter_context(contents_kept(fsdp_containers(modules)))
        for module in modules:
            kept.add_attributes(module)
            for buffer in module.buffers(recurse=False):
                kept.copy(buffer)
        for value in values:
            if isinstance(value, Tensor):
                kept.add_tensor(value)
            elif hasattr(value, "load_state_dict") and not isinstance(value, nn.Module | type):
                kept.add_attributes(value)
        if not follow_writes:
            yield
            return
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: kept.add_attributes(optimizer)
        )
        undo.callback(hook.remove)
        with _Writes(kept):
            yield


class _Kept:
    """What is restored when ``undo`` closes.

    Args:
        follow_writes: as of ``unchanged``.
    """

    def __init__(self, undo: ExitStack, follow_writes: bool):
        self._undo, self._follow_writes = undo, follow_writes
        self._objects: dict[int, Any] = {}  # by id; so they stay alive
        self._storages: set[int] = set()  # of the step's tensors
        self._copied: set[int] = set()

    def add_attributes(self, owner: Any) -> None:
        """Keep an object's attributes, and what is in those that are containers."""
        if id(owner) in self._objects:
            return
        self._objects[id(owner)] = owner
        attributes = getattr(owner, "__dict__", {})
        self._undo.enter_context(contents_kept([attributes, *_containers(attributes.values())]))
        for value in attributes.values():
            if isinstance(value, Tensor):
                self.add_tensor(value)
        if isinstance(owner, Optimizer):
            groups, states = owner.param_groups, list(owner.state.values())
            inner = [each for group in groups for each in _containers(group.values())]
            self._undo.enter_context(contents_kept([*groups, *states, *inner]))
            for value in tree_leaves((groups, states)):
                if isinstance(value, Tensor):
                    self.add_tensor(value)

    def add_tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._objects:
            return
        self._objects[id(tensor)] = tensor
        storage = _storage(tensor)
        self._storages.add(storage_key(storage))
        if not self._follow_writes:
            self.copy(tensor)
        if tensor.is_leaf:
            self._undo.callback(setattr, tensor, "requires_grad", tensor.requires_grad)
            self._undo.callback(setattr, tensor, "grad", tensor.grad)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.clone()

    def copy(self, tensor: Tensor) -> None:
        """Restore the tensor's values at the end."""
        storage = _storage(tensor)
        key = storage_key(storage)
        if key in self._copied or tensor.is_meta:
            return
        self._copied.add(key)
        values = storage.clone() if self._follow_writes else storage.cpu().clone()
        self._undo.callback(_write_back, storage, values)

    def before_write(self, tensor: Tensor) -> None:
        if storage_key(_storage(tensor)) in self._storages:
            self.copy(tensor)


class _Writes(TorchDispatchMode):
    """Tells of each tensor that an op is about to write to."""

    def __init__(self, kept: _Kept):
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        is_op = isinstance(func, OpOverload)
        for i, argument in enumerate(schema_of(func).arguments if is_op else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[i] if i < len(args) else given.get(argument.name)
                for value in tree_leaves(written):
                    if isinstance(value, Tensor):
                        self._kept.before_write(value)
        return func(*args, **given)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, _CONTAINERS)]


def _storage(tensor: Tensor) -> Any:
    own: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor
    return own.untyped_storage()


def _write_back(storage: Any, values: Any) -> None:
    if storage.size() != values.size():
        storage.resize_(values.size())
    storage.copy_(values)
