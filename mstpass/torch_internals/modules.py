"""Look inside modules: their own tensors, and what wrappers and torch.compile have put around them.

Wrapped are modules under activation checkpointing and FSDP, and those that torch.compile returns.
Source: torch/nn/modules/module.py, torch/_dynamo/eval_frame.py, torch/distributed/fsdp,
torch/distributed/algorithms/_checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.eval_frame.OptimizedModule",
        "torch.nn.Module._apply(fn, recurse)",
        "torch.nn.Module._compiled_call_impl",
        "torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE",
    ),
)
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

    with mock.patch.object(nn.Module, "_apply", apply):
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


def probe() -> None:
    APIS.require()
    module = nn.BatchNorm1d(2)
    names = [sorted(tensors) for tensors in own_tensors(module)]
    expected = [["bias", "weight"], ["num_batches_tracked", "running_mean", "running_var"]]
    APIS.expect(names == expected, "a module's _parameters and _buffers hold other tensors")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    for given in (module, function):
        made = torch.compile(given, backend="eager")
        APIS.expect(uncompiled(made) is given, "torch.compile does not tell what it was given")
    plain = is_compiled(module)
    module.compile(backend="eager")
    APIS.expect((plain, is_compiled(module)) == (False, True), "compiled modules cannot be told")
    uncompile_in_place(module)
    APIS.expect(not is_compiled(module), "nn.Module.compile cannot be undone")
    module.compile(backend="eager")
    if torch.distributed.is_available():
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
        from torch.distributed.fsdp import _common_utils

        wrapped = checkpoint_wrapper.checkpoint_wrapper(module)
        APIS.expect(wrapped_in(wrapped) is module, "checkpoint_wrapper holds its module elsewhere")
        APIS.expect(_common_utils.FSDP_WRAPPED_MODULE in WRAPPED, "FSDP holds its module elsewhere")
