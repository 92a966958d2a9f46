"""The device that a step is traced for: one of this machine, or a GPU that it does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from mstpass import gpus
from mstpass.errors import UserError
from mstpass.torch_internals.graphs import tree_map
from mstpass.torch_internals.pretended_gpu import NoPretendedGpu, is_pretended, pretended_gpu
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
        with fakes.replacing(step) as faked, fakes.made_there():
            yield faked


def made_for(device: torch.device | None, make: Callable[[], T]) -> T:
    """What ``make`` returns, which makes tensors on a device by default.

    Instead of a GPU that is pretended, they are on meta, where they take no memory. If that fails
    because a value is read, as a data loader does, they are made once more, on the CPU.

    Raises:
        UserError: as ``make`` raises it, for an error of the user's.
    """
    if device is None:
        return make()
    if device.type != "cuda" or not is_pretended():
        with torch.device(device):
            return make()
    try:
        with torch.device("meta"), _CudaAs("meta"):
            return make()
    except UserError as error:
        if not _reads_value_on_meta(error.__cause__):
            raise
    with torch.device("cpu"), _CudaAs("cpu"):
        return make()


def _reads_value_on_meta(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and "meta" in str(error).lower()


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


class _CudaAs(TorchFunctionMode):
    """Tensors that are made on CUDA, or moved there, are on another device: no GPU is needed."""

    def __init__(self, device: str):
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        moved = func in (torch.Tensor.to, torch.set_default_device) or "device" in kwargs
        if moved:
            args, kwargs = tree_map(self._other, tuple(args)), tree_map(self._other, kwargs)
        return func(*args, **kwargs)

    def _other(self, value: Any) -> Any:
        named = value.partition(":")[0] if isinstance(value, str) else None
        on_cuda = isinstance(value, torch.device) and value.type == "cuda"
        return self._device if on_cuda or named == "cuda" else value
