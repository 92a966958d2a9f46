"""The ops that copy a value from a GPU to pinned memory of the host and back, beside computation.

torch has them from 2.12 on: ``ao::offload`` and ``ao::reload`` begin a copy on a stream of their
own, and ``ao::wait_tensor`` makes the current stream wait for its end::

    copy = offload(x)                          back = reload(host, device, sizes, strides)
    host = wait(copy, None, x)                 x    = wait(back, None, host)

The last argument only keeps a tensor alive until the wait. The one before it, ``keepalive``, would
also free the tensor's storage, which neither Inductor's reuse of buffers nor a second backward over
the same graph (``retain_graph=True``) expects, so it is left out.

For a torch without these ops this file has the same three, named ``mstpass::``. Source:
torch/_functorch/_activation_offloading/offload_ops.py, read in torch 2.13 and 2.15.

Two more are mstpass' own in any case. A loop that needs one chunk at a time copies its rows itself,
on the stream that computes::

    x    = rows_on_host(host, device)                stands for the value; a loop reads it
    rows = copy_rows(host, start, length, device)    in the loop's step, in place of rows of x
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, library

from mstpass.torch_internals.graphs import OpOverload, schema_of

_TORCHS = "torch._functorch._activation_offloading.offload_ops"
SCHEMAS = (
    "offload(Tensor tensor) -> Tensor",
    "reload(Tensor tensor, Device device, SymInt[]? original_size=None, "
    "SymInt[]? original_stride=None) -> Tensor",
    "wait_tensor(Tensor(a) tensor, Tensor? keepalive=None, Tensor? last_use_of_storage=None) "
    "-> Tensor(a)",
)
_KEPT = "last_use_of_storage"


def _torchs() -> Any:
    """The namespace of torch's own ops; None if this torch lacks them, or a part."""
    try:
        importlib.import_module(_TORCHS)  # it defines them
        arguments = schema_of(torch.ops.ao.wait_tensor.default).arguments
    except (ImportError, AttributeError):
        return None
    return torch.ops.ao if any(a.name == _KEPT for a in arguments) else None


_NAMESPACE = _torchs()
IS_TORCHS = _NAMESPACE is not None


# ---- the same, for a torch without them --------------------------------------------------------
_streams: dict[torch.device, torch.Stream] = {}
_events: dict[int, tuple[torch.Event, torch.device]] = {}  # of pending copies, by their address


def _stream_of(device: torch.device) -> torch.Stream:
    if device not in _streams:
        _streams[device] = torch.Stream(device=device)
    return _streams[device]


def _copy(source: Tensor, target: Tensor, device: torch.device) -> Tensor:
    """Begin to copy behind all that the device's current stream has been given."""
    current, ours = torch.accelerator.current_stream(device), _stream_of(device)
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


def _reload(
    tensor: Tensor,
    device: torch.device,
    original_size: list[int] | None = None,
    original_stride: list[int] | None = None,
) -> Tensor:
    return _copy(tensor, on_device(tensor, device, original_size, original_stride), device)


def on_device(
    tensor: Tensor,
    device: torch.device,
    original_size: list[int] | None = None,
    original_stride: list[int] | None = None,
) -> Tensor:
    size = tensor.shape if original_size is None else original_size
    stride = tensor.stride() if original_stride is None else original_stride
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)


def _wait(
    tensor: Tensor, keepalive: Tensor | None = None, last_use_of_storage: Tensor | None = None
) -> Tensor:
    event, device = _events.pop(tensor.data_ptr())
    torch.accelerator.current_stream(device).wait_event(event)
    return tensor


def _define() -> Any:
    defined = library.Library("mstpass", "FRAGMENT")
    for schema in SCHEMAS:
        defined.define(schema)
    for name, run, fake in (
        ("offload", _offload, lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu")),
        ("reload", _reload, on_device),
        ("wait_tensor", _wait, lambda x, keepalive=None, last_use_of_storage=None: x),
    ):
        defined.impl(name, run, "CompositeExplicitAutograd")
        library.register_fake(f"mstpass::{name}", fake, lib=defined)
    _kept.append(defined)
    return torch.ops.mstpass


_kept: list[library.Library] = []  # a library that is collected takes its ops away
_ops = _NAMESPACE if IS_TORCHS else _define()
OFFLOAD: OpOverload = _ops.offload.default
RELOAD: OpOverload = _ops.reload.default
WAIT: OpOverload = _ops.wait_tensor.default


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


ROWS_SCHEMAS = (
    "rows_on_host(Tensor host, Device device) -> Tensor",
    "copy_rows(Tensor host, SymInt start, SymInt length, Device device) -> Tensor",
)
_rows = library.Library("mstpass", "FRAGMENT")
for _schema in ROWS_SCHEMAS:
    _rows.define(_schema)
_rows.impl("rows_on_host", _rows_on_host, "CompositeExplicitAutograd")
_rows.impl("copy_rows", _copy_rows, "CompositeExplicitAutograd")
library.register_fake("mstpass::rows_on_host", fake_value, lib=_rows)
library.register_fake("mstpass::copy_rows", fake_rows, lib=_rows)
ROWS_ON_HOST: OpOverload = torch.ops.mstpass.rows_on_host.default
COPY_ROWS: OpOverload = torch.ops.mstpass.copy_rows.default


def all_ops() -> tuple[OpOverload, ...]:
    return OFFLOAD, RELOAD, WAIT
