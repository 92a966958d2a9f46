"""Fake tensors in the place of a step's tensors, while it is traced or run without computing.

A step's tensors are in its arguments, in the modules that its functions are, hold or are given, and
in the globals and closures of those functions.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mstpass.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from mstpass.torch_internals.pytrees import tree_leaves, tree_map
from mstpass.tracing.names import modules_near

T = TypeVar("T")


class Fakes:
    """The fake tensor that stands for each tensor.

    Args:
        every: for real tensors as well; else for meta ones only, which stand for tensors of the
            default device.
    """

    def __init__(self, every: bool = False):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._every = every
        self._device = _default_device()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, so that it lives

    def of(self, value: Any) -> Any:
        """What stands for a tensor; anything else as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if value.device.type != "meta":
            return self.mode.from_tensor(value) if self._every else value
        if id(value) not in self._known:
            with self.mode, torch.device(self._device):
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, requires_grad=value.requires_grad)
            else:
                made.requires_grad_(value.requires_grad)
            self._known[id(value)] = value, made
        return self._known[id(value)][1]

    @contextmanager
    def within(self, step: T) -> Iterator[T]:
        """A step, as a tree, with fake tensors; what it refers to has them meanwhile."""
        with contextlib.ExitStack() as restored:
            for value, put in list(_places(tree_leaves(step))):
                made = self.of(value)
                if made is not value:
                    if value.is_leaf:  # an optimizer that holds it may have it without a gradient
                        restored.callback(setattr, value, "grad", value.grad)
                    restored.callback(put, value)
                    put(made)
            yield tree_map(self.of, step)


def innermost(fn: Any) -> Any:
    """What was given to ``torch.compile``, where that made the function."""
    while isinstance(fn, nn.Module) and (inner := fn._modules.get("_orig_mod")) is not None:
        fn = inner
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def runs_compiled(step: Any) -> bool:
    """Whether something in a step, as a tree, or what it calls, is made by torch.compile."""
    reached = list(_reached(tree_leaves(step)))
    modules = {id(m): m for leaf in reached for root in modules_near(leaf) for m in root.modules()}
    return any(map(is_compiled, (*reached, *modules.values())))


def is_compiled(value: Any) -> bool:
    """Whether torch.compile made it, or ``nn.Module.compile`` compiles it."""
    return innermost(value) is not value or getattr(value, "_compiled_call_impl", None) is not None


def _default_device() -> torch.device:
    device = torch.get_default_device()
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


Put = Callable[[Any], None]


def _places(leaves: Sequence[Any]) -> Iterator[tuple[Any, Put]]:
    """Where the leaves, and functions that they call, have tensors: each, and how to put another.

    In all modules below those that they are or hold, and in what they refer to.
    """
    found: set[int] = set()
    for leaf in map(innermost, _reached(leaves)):
        for root in modules_near(leaf):
            new = [module for module in root.modules() if id(module) not in found]
            found.update(map(id, new))
            for module in new:
                yield from _items(module._parameters)
                yield from _items(module._buffers)
        if (fn := _of_user(leaf)) is not None:
            for value, put in _referred(fn):
                yield value, put
                yield from _items(value)


def _reached(leaves: Sequence[Any]) -> Iterator[Any]:
    """The leaves, and the functions and modules that functions of the user's among them call."""
    seen: set[int] = set()
    stack = list(leaves)
    while stack:
        leaf = stack.pop()
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        yield leaf
        if (fn := _of_user(innermost(leaf))) is not None:
            stack += _called(fn)


def _of_user(leaf: Any) -> types.FunctionType | None:
    fn = getattr(leaf, "__func__", leaf)
    users = isinstance(fn, types.FunctionType) and "-packages" not in fn.__code__.co_filename
    return fn if users else None


def _items(container: Any) -> Iterator[tuple[Any, Put]]:
    keys: Iterable[Any] = ()
    if isinstance(container, dict):
        keys = list(container)
    elif isinstance(container, list):
        keys = range(len(container))
    for key in keys:
        yield container[key], functools.partial(container.__setitem__, key)


def _referred(fn: types.FunctionType) -> Iterator[tuple[Any, Put]]:
    """A function's globals, and what it has from the functions around it."""
    for name in _names(fn) & fn.__globals__.keys():
        yield fn.__globals__[name], functools.partial(fn.__globals__.__setitem__, name)
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing in it yet
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")


def _names(fn: types.FunctionType) -> set[str]:
    codes = [fn.__code__, *(c for c in fn.__code__.co_consts if isinstance(c, types.CodeType))]
    return {name for code in codes for name in code.co_names}


def _called(fn: types.FunctionType) -> Iterator[Any]:
    """What a function of the user's refers to, but for data."""
    names = _names(fn)
    for value, _ in _referred(fn):
        if isinstance(value, types.ModuleType):  # its functions and models, by their names
            values_there = (vars(value).get(name) for name in names)
            yield from (v for v in values_there if isinstance(v, types.FunctionType | nn.Module))
        elif isinstance(value, types.FunctionType | types.MethodType | nn.Module):
            yield value
