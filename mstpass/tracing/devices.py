"""The device that a step is traced for: one of this machine, or a GPU that it does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from mstpass import gpus
from mstpass.errors import UserError
from mstpass.torch_internals.pretended_gpu import NoPretendedGpu, is_pretended, pretended_gpu
from mstpass.torch_internals.pytrees import tree_map
from mstpass.tracing.fake_tensors import FakeTensors

T = TypeVar("T")


class DeviceError(UserError):
    """There is no such device, or this machine cannot pretend to have it."""


@contextmanager
def traced_for(
    device: torch.device | str | None, gpu: str | None = None
) -> Iterator[torch.device | None]:
    """Traces in here are for a device.

    Args:
        device: None: the device that a step's tensors are on.
        gpu: the kind of GPU, by a name of ``mstpass.gpus``. It is pretended, even where this
            machine has a GPU. None: the GPU of this machine; where it has none, an H100.

    Yields:
        The device that all tensors of the step stand for; None: each for one of its own device.

    Raises:
        DeviceError: the device or the kind of GPU is unknown, or cannot be pretended.
    """
    wanted = _device(device, gpu)
    if wanted is None or wanted.type != "cuda" or (gpu is None and torch.cuda.is_available()):
        yield wanted
        return
    kind = gpus.gpu(gpu or gpus.DEFAULT)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(pretended_gpu(kind))
        except NoPretendedGpu as error:
            raise DeviceError(f"cannot trace for a GPU that is not there: {error}") from None
        yield torch.device("cuda", 0)


@contextmanager
def on_fake_tensors(
    step: T, device: torch.device | str | None, gpu: str | None = None
) -> Iterator[T]:
    """A step (a tree of functions, modules and arguments) with fake tensors of a device.

    What runs in here computes nothing. Without a device, the step is as it is.

    Raises:
        DeviceError: as of ``traced_for``.
    """
    with traced_for(device, gpu) as target:
        if target is None:
            yield step
            return
        fakes = FakeTensors(also_real=True, device=target)
        with fakes.replacing(step) as faked, fakes.mode:
            yield faked


@contextmanager
def tensors_made_for(device: torch.device | None) -> Iterator[None]:
    """Tensors are made on a device by default; instead of a GPU that is pretended, on meta."""
    if device is None:
        yield
    elif device.type == "cuda" and is_pretended():
        with torch.device("meta"), _CudaAsMeta():
            yield
    else:
        with torch.device(device):
            yield


def _device(device: torch.device | str | None, gpu: str | None) -> torch.device | None:
    if device is None:
        return None if gpu is None else torch.device("cuda")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise DeviceError(
            f"{str(device)!r} is not a device; write cuda or cpu, for instance"
        ) from None
    if found.type == "meta" and gpu is None:
        raise DeviceError(
            "tensors on meta stand for those of another device: leave device out for the default "
            "device, or write cuda"
        )
    if gpu is not None and found.type != "cuda":
        raise DeviceError(f"gpu={gpu!r} names a kind of GPU, but the device is {found}; write cuda")
    return found


class _CudaAsMeta(TorchFunctionMode):
    """Tensors that are made on CUDA, or moved there, are on the meta device: no GPU is needed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        moved = func in (torch.Tensor.to, torch.set_default_device) or "device" in kwargs
        if moved:
            args, kwargs = tree_map(_meta, tuple(args)), tree_map(_meta, kwargs)
        return func(*args, **kwargs)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "meta"
    return value
