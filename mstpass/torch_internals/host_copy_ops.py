"""The ops that copy a value from a GPU to pinned memory of the host and back, beside computation.

``offload`` and ``reload`` begin a copy on a stream of their own, and ``wait_tensor`` makes the
current stream wait for its end::

    copy = offload(x)                          back = reload(host, device, strides)
    host = wait(copy, x)                       x    = wait(back, host)

The last argument only keeps a tensor alive until the wait. torch has such ops from 2.12 on,
``ao::offload`` (torch/_functorch/_activation_offloading/offload_ops.py); these are there in every
version.

A loop that needs one chunk at a time copies its rows itself, on the stream that computes::

    x    = rows_on_host(host, device)                stands for the value; a loop reads it
    rows = copy_rows(host, start, length, device)    in the loop's step, in place of rows of x
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstpass.torch_internals.graphs import OpOverload, own_op

_streams: dict[torch.device, torch.Stream] = {}
_events: dict[int, tuple[torch.Event, torch.device]] = {}  # of pending copies, by their address


def _copy(source: Tensor, target: Tensor, device: torch.device) -> Tensor:
    """Begin to copy behind all that the device's current stream has been given."""
    if device not in _streams:
        _streams[device] = torch.Stream(device=device)
    current, ours = torch.accelerator.current_stream(device), _streams[device]
    ours.wait_stream(current)
    torch.accelerator.set_stream(ours)
    try:
        target.copy_(source, non_blocking=True)
        event = torch.Event()
        ours.record_event(event)
    finally:
        torch.accelerator.set_stream(current)
    _events[target.data_ptr()] = event, device
    return target


def _offload(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return _copy(tensor, host, tensor.device)


def fake_offload(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _reload(tensor: Tensor, device: torch.device, stride: list[int] | None = None) -> Tensor:
    return _copy(tensor, on_device(tensor, device, stride), device)


def on_device(tensor: Tensor, device: torch.device, stride: list[int] | None = None) -> Tensor:
    strides = tensor.stride() if stride is None else stride
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)


def _wait(tensor: Tensor, last_use: Tensor) -> Tensor:
    event, device = _events.pop(tensor.data_ptr())
    torch.accelerator.current_stream(device).wait_event(event)
    return tensor


def fake_wait(tensor: Tensor, last_use: Tensor) -> Tensor:
    return tensor


# ---- rows ----------------------------------------------------------------------------------------
def _rows_on_host(host: Tensor, device: torch.device) -> Tensor:
    """All of the value, for what is no loop."""
    return host.to(device, non_blocking=True, copy=True)


def _copy_rows(host: Tensor, start: int, length: int, device: torch.device) -> Tensor:
    """The memory of the host is pinned, and freed only when the copy is over, which nothing waits
    for: torch's allocator for it knows the streams that read it."""
    return host.narrow(0, start, length).to(device, non_blocking=True, copy=True)


def fake_value(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)


def fake_rows(host: Tensor, start: int, length: int, device: torch.device) -> Tensor:
    return host.new_empty((length, *host.shape[1:]), device=device)


OFFLOAD: OpOverload = own_op("offload(Tensor tensor) -> Tensor", _offload, fake_offload)
RELOAD: OpOverload = own_op(
    "reload(Tensor tensor, Device device, SymInt[]? stride=None) -> Tensor", _reload, on_device
)
WAIT: OpOverload = own_op(
    "wait_tensor(Tensor(a) tensor, Tensor last_use) -> Tensor(a)", _wait, fake_wait
)
ROWS_ON_HOST: OpOverload = own_op(
    "rows_on_host(Tensor host, Device device) -> Tensor", _rows_on_host, fake_value
)
COPY_ROWS: OpOverload = own_op(
    "copy_rows(Tensor host, SymInt start, SymInt length, Device device) -> Tensor",
    _copy_rows,
    fake_rows,
)


def all_ops() -> tuple[OpOverload, ...]:
    return OFFLOAD, RELOAD, WAIT
