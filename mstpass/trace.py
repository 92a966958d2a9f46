"""The joint graph of a function, traced as for a compilation and not compiled.

Nothing is run: Dynamo traces on fake tensors, and AOTAutograd's partitioner is where it ends. What
this process has compiled stays: the function is called from one whose code is new each time, so
that Dynamo neither finds nor keeps anything under its name (``CacheEntry``, and the code state that
makes a size dynamic once it has had two values: torch/_dynamo/pgo.py; checked with torch 2.11 and
2.13).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from mstpass.backend import prepare
from mstpass.extras import UserError
from mstpass.linter.names import modules_near

T = TypeVar("T")
Take = Callable[[fx.GraphModule, dict[str, Any]], T]
_numbers = itertools.count()


class NoJointGraph(UserError):
    """The function cannot be traced as one graph, or has no backward."""


def at_joint(
    fn: Callable[..., Any], inputs: Sequence[Tensor], take: Callable[[fx.GraphModule, int], T]
) -> T:
    """What ``take`` makes of a function's joint graph and its number of forward outputs.

    The function is traced but not compiled.
    """
    return trace_joint(fn, inputs, {}, lambda gm, kwargs: take(gm, kwargs["num_fwd_outputs"]))


def trace_joint(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    take: Take[T],
    before: Callable[[Sequence[Any]], None] = lambda inputs: None,
) -> T:
    """What ``take`` makes of a function's joint graph and what AOTAutograd gives a partitioner.

    Meta tensors among the arguments, and in the modules that the function is, holds or is given,
    stand for tensors of the default device.

    Args:
        before: is given the graph's inputs, before it is traced further.

    Raises:
        NoJointGraph: there is no backward. What the function, Dynamo or ``take`` raise comes as it
            is.
    """
    found: list[T] = []

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:
            prepare(gm)
            found.append(take(gm, given))
            raise _Taken

        def uuid(self) -> Any:
            return None

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        before(example_inputs)
        patches = {"custom_partitioner_fn": Partitioner(), "fx_graph_cache": False}
        compile_fx(gm, example_inputs, inner_compile=not_joint, config_patches=patches)
        raise AssertionError("compile_fx asked neither the partitioner nor the compiler")

    def not_joint(*_: Any, **__: Any) -> Any:
        raise NoJointGraph("no backward: nothing that requires a gradient reaches its result")

    inner = innermost(fn)
    with with_storage((inner, args, kwargs)) as (_, given_args, given_kwargs), _undisturbed():
        try:
            compiled = torch.compile(_caller_of(inner), backend=backend, fullgraph=True)
            compiled(inner, given_args, given_kwargs)
        except Exception as error:
            if not found:
                raise cause_of(error) from None
    if not found:
        raise NoJointGraph("no computation: nothing was traced")
    return found[0]


class _Taken(Exception):
    """The partitioner has what it wanted."""


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What was given to ``torch.compile``, where that made the function."""
    while isinstance(fn, nn.Module) and (inner := fn._modules.get("_orig_mod")) is not None:
        fn = inner
    found: Callable[..., Any] = getattr(fn, "_torchdynamo_orig_callable", fn)
    return found


def cause_of(error: Exception) -> Exception:
    """What a backend raised, of Dynamo's error about it; others as they are."""
    inner = getattr(error, "inner_exception", None)
    return cause_of(inner) if isinstance(inner, Exception) else error


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _caller_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls it, with code of its own and the same globals.

    Of a function with other globals Dynamo would import the module, and some have none that can be
    imported, such as those of ``exec``.
    """
    code = _call.__code__.replace(co_name=f"traced_{next(_numbers)}")
    return types.FunctionType(code, _globals_of(fn))


def _globals_of(fn: Any) -> dict[str, Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    fn = getattr(fn, "__func__", fn)
    known = getattr(fn, "__globals__", None)
    fresh = {"__builtins__": builtins, "__name__": __name__}
    return known if isinstance(known, dict) and "__builtins__" in known else fresh


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The random state stays as it is; torch does not print what the error that it raises says."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        log.disabled = disabled


@contextmanager
def with_storage(step: T) -> Iterator[T]:
    """A step, as a tree, whose meta tensors are fake ones of the default device meanwhile.

    The modules that it is, holds or is given have fake parameters and buffers in the place of meta
    ones, and get theirs back; so have the globals and closures of its functions.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = _default_device()
    known: dict[int, Tensor] = {}

    def real(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.device.type == "meta"):
            return value
        if id(value) not in known:
            with mode, torch.device(device):
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, requires_grad=value.requires_grad)
            elif value.is_leaf:
                made.requires_grad_(value.requires_grad)
            known[id(value)] = made
        return known[id(value)]

    with contextlib.ExitStack() as restored:
        for value, put in list(_places(tree_leaves(step))):
            made = real(value)
            if made is not value:
                restored.callback(put, value)
                put(made)
        yield tree_map(real, step)


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
    seen: set[int] = set()
    found: set[int] = set()
    stack = list(leaves)
    while stack:
        leaf = stack.pop()
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        for root in modules_near(leaf):
            new = [module for module in root.modules() if id(module) not in found]
            found.update(map(id, new))
            for module in new:
                yield from _items(module._parameters)
                yield from _items(module._buffers)
        fn = getattr(leaf, "__func__", leaf)
        if isinstance(fn, types.FunctionType) and "-packages" not in fn.__code__.co_filename:
            for value, put in _referred(fn):
                yield value, put
                yield from _items(value)
            stack += _called(fn)


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
