"""Backwards that keep their graph: ``retain_graph=True`` and ``create_graph=True``.

mstpass has the backward compiled with its forward, before anything is known about how it will be
called. Inductor then plans to overwrite the *donated* buffers (donated_buffers.py), and torch
refuses to run such a backward while its graph is kept, though Inductor alone, which compiles the
backward at its first call, would have donated nothing. Here a backward whose graph is kept gets
copies of the donated buffers and overwrites these.

A gradient that was taken with ``create_graph=True`` cannot be differentiated again: torch compiles
no double backward. Its error says so; here it also says what to do instead.

Source: ``CompiledFunction`` in torch/_functorch/_aot_autograd/runtime_wrappers.py, which
``RuntimeWrapper.post_compile`` gets by its ``apply``, whether it is compiled now or was cached.
Dynamo, which compiles whatever a step calls between two graphs, is kept from what is added.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd import runtime_wrappers

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper.post_compile(compiled_fn)",
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs",
        "torch._C._autograd._get_current_graph_task_keep_graph()",
    ),
)
DOUBLE_BACKWARD = (
    "torch.compile with aot_autograd does not currently support double backward: this is the "
    "gradient of a gradient that torch.autograd.grad or backward took, with create_graph=True, "
    "through a compiled function. Take the inner gradient with torch.func.grad inside of the "
    "compiled function, as in torch.func.grad(lambda x: model(x).sum())(x), or do not compile the "
    "function that is differentiated twice"
)


@contextmanager
def backwards_may_keep_graphs() -> Iterator[None]:
    """Backwards of functions that this thread compiles in here may run while graphs are kept."""
    _patch_once()
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


_here: ContextVar[bool] = ContextVar("this thread compiles with mstpass", default=False)


@functools.cache
def _patch_once() -> None:
    """The patch stays: threads that compile without mstpass are told apart by ``_here``."""
    original = runtime_wrappers.RuntimeWrapper.post_compile

    def post_compile(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(compiled_fn, "__self__", None)
        if _here.get() and hasattr(function, "_double_backward"):
            _extend(function)
        return original(self, compiled_fn, *args, **kwargs)

    runtime_wrappers.RuntimeWrapper.post_compile = post_compile  # type: ignore[method-assign]


def _extend(function: Any) -> None:
    """Extend the autograd function of a compiled graph."""
    function._double_backward = staticmethod(_explained(function._double_backward))
    donated = function.metadata.bw_donated_idxs
    if donated and function.compiled_bw is not None:  # else torch itself donates nothing
        function.metadata.bw_donated_idxs = _CopiedWhereKept(donated)
        function._backward_impl = staticmethod(_copying(function._backward_impl, tuple(donated)))


class _CopiedWhereKept(list[int]):
    """Positions of donated buffers; torch, which asks whether they are ``!= []``, finds none."""

    def __ne__(self, other: object) -> bool:
        return False

    def __reduce__(self) -> Any:  # the compile caches read it without this project
        return list, (list(self),)


def _copying(run: Callable[..., Any], donated: Sequence[int]) -> Callable[..., Any]:
    """The backward, which gets copies of the donated buffers while its graph is kept."""

    @torch.compiler.disable
    def copying(ctx: Any, all_args: list[Any]) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            for position in donated:
                all_args[position] = _copy(all_args[position])
        return run(ctx, all_args)

    return copying


def _copy(value: Any) -> Any:
    """A copy with the same strides: compiled code relies on them."""
    if not isinstance(value, Tensor):
        return value
    copied = value.clone()
    if copied.stride() == value.stride():
        return copied
    storage = value.untyped_storage().clone()
    return value.new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())


def _explained(double_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward with a graph of its own, whose error says what to do."""

    @torch.compiler.disable
    def explained(*args: Any) -> Any:
        gradients = double_backward(*args)
        made = gradients if isinstance(gradients, tuple) else (gradients,)
        nodes = [g.grad_fn for g in made if isinstance(g, Tensor) and g.grad_fn is not None]
        if nodes:
            nodes[0].register_prehook(_refuse)
        return gradients

    return explained


def _refuse(_: Any) -> None:
    raise RuntimeError(DOUBLE_BACKWARD)


def probe() -> None:
    APIS.require()
    source = inspect.getsource(runtime_wrappers)
    for used in ("CompiledFunction._double_backward", "CompiledFunction._backward_impl"):
        APIS.expect(used in source, f"the autograd function of a graph has no {used}")
