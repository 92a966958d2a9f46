"""Have torch believe in a GPU that is not there, so that a step is traced and compiled for it.

    with pretended_gpu(gpus.gpu("h100")):
        ...  # fake tensors on cuda:0 can be traced and differentiated; nothing can run there

What asks for a GPU                        what it is told, and why
-----------------------------------------  -----------------------------------------------------
torch.cuda, Dynamo's interface of devices  one device of that kind, all memory free
the autograd engine                        pretended_gpu_engine.py
F.scaled_dot_product_attention             pretended_gpu_attention.py
FakeTensorMode                             it makes no real tensor to learn about the device
UniformValueConstantFolder                 it runs operators on one element: on the CPU instead
torch.tensor                               it moves what it has made as an operator of its own
proxy_tensor                               it moves no constant to the GPU, not even an empty one
pad_mm._should_pad                         it measures products; instead, none is padded

Other threads see no such GPU: each patch asks whose question it is. But the engine and the
attention are those of the process, so no other thread may differentiate on CUDA meanwhile. On a
machine with a GPU, that GPU is hidden until the end. tests/cuda/pretended_triton.py adds what
compiling needs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch.utils._triton as triton_utils
from torch._dynamo import device_interface
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor

from mstpass.gpus import Gpu
from mstpass.torch_internals.fake_tensors import TorchDispatchMode
from mstpass.torch_internals.pretended_gpu_attention import attention_of
from mstpass.torch_internals.pretended_gpu_engine import NoPretendedGpu, engine_without_gpu
from mstpass.torch_internals.settings import SharedPatch, compiled_in_one_process, replaced

__all__ = ["NoPretendedGpu", "is_pretended", "pretended_gpu"]


@contextmanager
def pretended_gpu(kind: Gpu) -> Iterator[None]:
    """In here ``cuda:0`` is a GPU of this kind. Threads that need one at once must agree on it.

    Raises:
        NoPretendedGpu: this machine lacks what it takes.
    """
    if kind.name not in _patches:
        _patches[kind.name] = SharedPatch(lambda: _pretended(kind))
    with _patches[kind.name]():
        token = _here.set(True)
        try:
            yield
        finally:
            _here.reset(token)


_patches: dict[str, SharedPatch] = {}
_here: ContextVar[bool] = ContextVar("a GPU is pretended in this thread", default=False)


def is_pretended() -> bool:
    """Whether there is a pretended GPU just now."""
    return any(patch.is_made for patch in _patches.values())


@contextmanager
def _pretended(kind: Gpu) -> Iterator[None]:
    folder = joint_graph.UniformValueConstantFolder
    told_here = (
        *_changes_of_driver(kind),
        (fake_tensor, "init_gpu_context", lambda *_: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda _: True)),
        (folder, "_deduce_value", _on_cpu(folder._deduce_value)),
        (pad_mm, "_should_pad", lambda *_, **__: False),
    )
    with (
        replaced(*(_in_this_thread(*change) for change in told_here)),
        replaced((proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1)),
        mock.patch.dict(device_interface.caching_worker_device_properties, clear=True),
        mock.patch.dict(device_interface.caching_worker_current_devices, clear=True),
        _tensors_lifted_on_cpu(),
        compiled_in_one_process(),
        _forgotten(triton_utils),
        engine_without_gpu(),
        attention_of(kind.capability),
    ):
        yield


Change = tuple[Any, str, Any]  # of an attribute: its owner, its name and what it is


def _changes_of_driver(kind: Gpu) -> Iterator[Change]:
    """``torch.cuda`` and Dynamo's interface of devices answer as for a GPU of this kind."""
    interface = device_interface.CudaInterface
    for name, answer in _answers(kind).items():
        yield torch.cuda, name, answer
        for owner in (interface, interface.Worker):
            if hasattr(owner, name):
                yield owner, name, staticmethod(answer)


def _in_this_thread(owner: Any, name: str, value: Any) -> Change:
    return owner, name, _pretended_here(value, inspect.getattr_static(owner, name))


@torch.compiler.assume_constant_result  # Dynamo cannot trace a context variable
def _is_here() -> bool:
    return _here.get()


def _pretended_here(value: Any, original: Any) -> Any:
    """``value`` in threads that pretend a GPU, ``original`` in all others."""
    if isinstance(value, property):
        of_value, of_original = value.__get__, original.__get__
        return property(lambda self: of_value(self) if _here.get() else of_original(self))
    static = isinstance(value, staticmethod)
    ours, theirs = (f.__func__ if isinstance(f, staticmethod) else f for f in (value, original))

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if _is_here() else theirs)(*args, **kwargs)

    return staticmethod(call) if static else call


def _answers(kind: Gpu) -> dict[str, Callable[..., Any]]:
    """The functions of ``torch.cuda`` that would ask the driver."""
    major, minor = kind.capability
    shared_bytes = kind.shared_memory_per_block_bytes
    described = types.SimpleNamespace(
        name=kind.full_name,
        major=major,
        minor=minor,
        total_memory=kind.memory_bytes,
        multi_processor_count=kind.multiprocessors,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048 if minor == 0 else 1536,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared_bytes,
        shared_memory_per_multiprocessor=shared_bytes + 1024,
        L2_cache_size=kind.l2_bytes,
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid="",
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "_is_compiled"), True),
        **dict.fromkeys(("_lazy_init", "init", "set_device", "set_rng_state", "synchronize")),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
        **dict.fromkeys(("memory_reserved", "memory_allocated"), 0),
        "device_count": 1,
        "get_device_properties": described,
        "get_device_name": kind.full_name,
        "get_device_capability": kind.capability,
        "is_bf16_supported": kind.capability >= (8, 0),
        "is_current_stream_capturing": False,
        "mem_get_info": (kind.memory_bytes, kind.memory_bytes),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    return {name: _told(answer) for name, answer in answers.items()}


def _told(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose operators run on the CPU."""

    def run(self: Any, *args: Any) -> Any:
        with _CpuMode():
            return method(self, *args)

    return run


_CPU = torch.device("cpu")


class _CpuMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _CPU
        return func(*(_CPU if isinstance(a, torch.device) else a for a in args), **kwargs)


@contextmanager
def _tensors_lifted_on_cpu() -> Iterator[None]:
    """``torch.tensor(3.0, device="cuda")`` makes a tensor on the CPU, and a mode moves it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextmanager
def _forgotten(module: types.ModuleType) -> Iterator[None]:
    """What functions of the module have cached about a GPU is forgotten, before and after."""

    def forget() -> None:
        for value in vars(module).values():
            with contextlib.suppress(AttributeError):
                value.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()
