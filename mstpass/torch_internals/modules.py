"""Look inside modules: their own tensors, what wraps them, and what FSDP2 keeps beside them.

Wrapped are modules under activation checkpointing and FSDP, and those that torch.compile returns.
Source: torch/nn/modules/module.py, torch/_dynamo/eval_frame.py,
torch/distributed/algorithms/_checkpoint, torch/distributed/fsdp/_fully_shard (``FSDPState``,
``FSDPParamGroup``, ``FSDPParam``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mstpass.torch_internals.settings import replaced

COMPILED = "_orig_mod"
WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", COMPILED)


def own_tensors(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Its parameters and its buffers by name: the dicts themselves, which may be written to.

    ``setattr`` would refuse a plain tensor in a parameter's place.
    """
    yield module._parameters
    yield module._buffers


def wrapped_in(module: nn.Module, names: tuple[str, ...] = WRAPPED) -> nn.Module | None:
    """What a wrapper holds; None of a module that is no wrapper."""
    held = (module._modules.get(name) for name in names)
    return next((inner for inner in held if inner is not None), None)


def uncompiled(fn: Any) -> Any:
    """The function or module that was given to ``torch.compile``; others as they are."""
    while isinstance(fn, nn.Module) and (inner := wrapped_in(fn, (COMPILED,))) is not None:
        fn = inner
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def is_compiled(value: Any) -> bool:
    """Whether torch.compile made the value, or ``nn.Module.compile`` was called on it."""
    if getattr(value, "_torchdynamo_disable", False):  # torch.compiler.disable wraps as well
        return False
    return uncompiled(value) is not value or getattr(value, "_compiled_call_impl", None) is not None


@contextmanager
def fake_modules_moved() -> Iterator[None]:
    """Modules of fake tensors can be moved to a device, and cast, between compiled graphs.

    ``Module._apply`` swaps fake parameters in place, which torch refuses once Dynamo has guarded
    one of them. In here they are replaced; parameters that are tied stay tied.
    """
    # (id of the conversion, id of the tensor) -> both, which so stay alive, and the new tensor
    known: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def converted(convert: Any, tensor: Any) -> Any:
        key = id(convert), id(tensor)
        if key not in known:
            with torch.no_grad():
                made = convert(tensor)
            if isinstance(tensor, nn.Parameter) and made is not tensor:
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[key] = convert, tensor, made
        return known[key][2]

    @torch.compiler.disable
    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else (self,):
            for tensors in own_tensors(module):
                held = {name: value for name, value in tensors.items() if value is not None}
                tensors.update({name: converted(fn, value) for name, value in held.items()})
        return self

    with replaced((nn.Module, "_apply", apply)):
        yield


def compile_in_place(
    module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]], **given: Any
) -> None:
    """``module.compile(**given)``; what ``around`` makes of the compiled call is what runs."""
    module.compile(**given)
    compiled: Any = module._compiled_call_impl
    module._compiled_call_impl = around(compiled)


def uncompile_in_place(module: nn.Module) -> None:
    """Undo ``module.compile(...)``; calls run as before it."""
    vars(module).pop("_compiled_call_impl", None)


# ---- FSDP2 ---------------------------------------------------------------------------------------
_FSDP = "torch.distributed.fsdp._fully_shard"


def fsdp_containers(modules: Iterable[nn.Module]) -> list[Any]:
    """The attributes of FSDP2's objects of these modules, and the lists, dicts and sets in them.

    ``fully_shard`` puts hooks around a module. They gather the module's weights from shards that
    FSDP2 keeps beside the module, and note in objects of their own what is gathered and what comes
    next. A trace that runs the hooks on fake tensors needs fakes of those shards, or one rank alone
    would gather real ones. Afterwards the objects say that weights are gathered, which are fake;
    they must be restored, or the next real step would fail.
    """
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    attributes = [vars(own) for own in _objects(states)]
    return attributes + [v for own in attributes for v in own.values() if _is_container(v)]


@contextmanager
def contents_kept(containers: Iterable[Any]) -> Iterator[None]:
    """Restore afterwards what is in these lists, dicts and sets."""
    kept = [(container, container.copy()) for container in containers]
    try:
        yield
    finally:
        for container, before in kept:
            container.clear()
            container.extend(before) if isinstance(before, list) else container.update(before)


def _objects(roots: Iterable[Any]) -> Iterator[Any]:
    """The objects of FSDP2 that can be reached from the roots through their attributes."""
    stack, seen = list(roots), set()
    while stack:
        value = stack.pop()
        if _is_container(value) or isinstance(value, tuple):
            stack += value.values() if isinstance(value, dict) else value
        elif id(value) not in seen and _is_of_fsdp(value):
            seen.add(id(value))
            yield value
            stack += vars(value).values()


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set)


def _is_of_fsdp(value: Any) -> bool:
    kind = type(value)
    is_state = kind.__module__.startswith(_FSDP) and not issubclass(kind, nn.Module | enum.Enum)
    return is_state and hasattr(value, "__dict__")
