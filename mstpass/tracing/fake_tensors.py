"""Put fake tensors in the place of a step's tensors while it is traced or run without computing.

A step's tensors are in its arguments, in the modules that its functions are, hold or are given, and
in the globals and closures of those functions.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from mstpass.torch_internals.default_device import default_device
from mstpass.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from mstpass.torch_internals.graphs import tree_leaves, tree_map
from mstpass.torch_internals.modules import (
    contents_kept,
    fake_modules_moved,
    fsdp_containers,
    is_compiled,
    own_tensors,
    uncompiled,
)
from mstpass.tracing.names import modules_near

T = TypeVar("T")
Setter = Callable[[Any], None]
_CALLABLE = types.FunctionType | types.MethodType | nn.Module | functools.partial


class FakeTensors:
    """Stand-ins for tensors; the same tensor always gets the same one.

    Args:
        also_real: real tensors get a stand-in as well. Otherwise only meta tensors do; they stand
            for tensors of the default device.
        device: all tensors, real or meta, stand for tensors of this device.
    """

    def __init__(self, also_real: bool = False, device: torch.device | None = None):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._also_real = also_real
        self._moved = device is not None
        self._device = device or _default_device()
        # id of a tensor -> the tensor, which so stays alive, and its stand-in
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def fake_of(self, value: Any) -> Any:
        """The stand-in of a tensor; any other value as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if value.device.type != "meta" and not self._moved:
            return self.mode.from_tensor(value) if self._also_real else value
        if id(value) not in self._known:
            with self.mode, torch.device(self._device):
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=value.requires_grad)
            else:
                fake.requires_grad_(value.requires_grad)
            self._known[id(value)] = value, fake
        return self._known[id(value)][1]

    @contextmanager
    def made_there(self) -> Iterator[None]:
        """Tensors that are made in here stand for tensors of the device, if all others do."""
        if not self._moved:
            yield
            return
        device = self._device

        def from_numpy(array: Any) -> Tensor:
            return torch.as_tensor(array, device=device)

        patch = mock.patch.object(torch, "from_numpy", from_numpy)
        with self.mode, default_device(device), patch, fake_modules_moved():
            yield

    @contextmanager
    def replacing(self, step: T) -> Iterator[T]:
        """The step with stand-ins for its tensors. Everything is restored afterwards.

        Args:
            step: a tree of functions, modules and arguments.
        """
        with contextlib.ExitStack() as restored:
            of_fsdp = fsdp_containers(modules_of(step))
            restored.enter_context(contents_kept(of_fsdp))
            places = chain(tensor_places(tree_leaves(step)), *map(_items, of_fsdp))
            for value, put in list(places):
                fake = self.fake_of(value)
                if fake is not value:
                    if value.is_leaf:  # a step with zero_grad() may drop the gradient
                        restored.callback(setattr, value, "grad", value.grad)
                    restored.callback(put, value)
                    put(fake)
            yield tree_map(self.fake_of, step)


# ---- what torch.compile made -------------------------------------------------------------------
def calls_compiled(step: Any) -> bool:
    """Whether a function or module in a step (a tree) is compiled, or calls one that is."""
    return any(map(is_compiled, (*_reachable(tree_leaves(step)), *modules_of(step))))


def _default_device() -> torch.device:
    device = torch.get_default_device()
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- where a step has tensors ------------------------------------------------------------------
def tensor_places(leaves: Sequence[Any]) -> Iterator[tuple[Any, Setter]]:
    """Each place where the leaves, or functions that they call, may hold a tensor.

    Such places are in all modules that they are, hold or contain, in the arguments of partials, and
    in the globals and closures of functions, also one level down in a list or dict.

    Yields:
        The value in the place, and a function that puts another value there.
    """
    for module in modules_of(leaves):
        for tensors in own_tensors(module):
            yield from _items(tensors)
        yield from _attributes(module)
    for leaf in map(uncompiled, _reachable(leaves)):
        if isinstance(leaf, functools.partial):
            for value, put in _arguments(leaf):
                yield value, put
                yield from _items(value)
        if (fn := _user_function(leaf)) is not None:
            for value, put in _globals_and_cells(fn):
                yield value, put
                yield from _items(value)


def modules_of(step: Any) -> list[nn.Module]:
    """All modules that the functions and modules in a step (a tree) are, hold or contain."""
    reached = map(uncompiled, _reachable(tree_leaves(step)))
    roots = (root for leaf in reached for root in modules_near(leaf))
    return list({id(m): m for root in roots for m in root.modules()}.values())


def _reachable(leaves: Sequence[Any]) -> Iterator[Any]:
    """The leaves, and all functions and modules that the user's functions among them call."""
    seen: set[int] = set()
    stack = list(leaves)
    while stack:
        leaf = stack.pop()
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        yield leaf
        if isinstance(leaf, functools.partial):
            stack += [leaf.func, *tree_leaves((leaf.args, leaf.keywords))]
        if (fn := _user_function(uncompiled(leaf))) is not None:
            stack += _callees(fn)


def _user_function(leaf: Any) -> types.FunctionType | None:
    """The function of a leaf, unless it is one of an installed package."""
    fn = getattr(leaf, "__func__", leaf)
    is_users = isinstance(fn, types.FunctionType) and "-packages" not in fn.__code__.co_filename
    return fn if is_users else None


def _items(container: Any) -> Iterator[tuple[Any, Setter]]:
    """The values of a dict or list, each with a function that replaces it."""
    keys: Iterable[Any] = ()
    if isinstance(container, dict):
        keys = list(container)
    elif isinstance(container, list):
        keys = range(len(container))
    for key in keys:
        yield container[key], functools.partial(container.__setitem__, key)


def _attributes(module: nn.Module) -> Iterator[tuple[Any, Setter]]:
    """A module's tensors that are plain attributes, also one level down in a list or dict."""
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if isinstance(value, Tensor):
            yield value, functools.partial(attributes.__setitem__, name)
        elif not name.startswith("_"):
            yield from _items(value)


def _arguments(bound: Any) -> Iterator[tuple[Any, Setter]]:
    """The arguments that a ``functools.partial`` holds, with their setters."""

    def put(i: int, value: Any) -> None:
        args = (*bound.args[:i], value, *bound.args[i + 1 :])
        state: Any = bound  # typeshed does not know a partial's __setstate__
        state.__setstate__((bound.func, args, bound.keywords, bound.__dict__))

    for i, value in enumerate(bound.args):
        yield value, functools.partial(put, i)
    yield from _items(bound.keywords)


def _globals_and_cells(fn: types.FunctionType) -> Iterator[tuple[Any, Setter]]:
    """The globals that a function uses and the cells of its closure, with their setters."""
    for name in _names(fn) & fn.__globals__.keys():
        yield fn.__globals__[name], functools.partial(fn.__globals__.__setitem__, name)
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")


def _names(fn: types.FunctionType) -> set[str]:
    codes = [fn.__code__, *(c for c in fn.__code__.co_consts if isinstance(c, types.CodeType))]
    return {name for code in codes for name in code.co_names}


def _callees(fn: types.FunctionType) -> Iterator[Any]:
    """The functions, methods and modules that a function refers to."""
    names = _names(fn)
    for value, _ in _globals_and_cells(fn):
        if isinstance(value, types.ModuleType):  # the functions and models that it uses of it
            members = (vars(value).get(name) for name in names)
            yield from (m for m in members if isinstance(m, types.FunctionType | nn.Module))
        elif isinstance(value, _CALLABLE):
            yield value
