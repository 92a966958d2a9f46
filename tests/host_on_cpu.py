"""Saved values wait "on the host" of a step that runs on the CPU: the ops of the copies emulated.

A GPU copies at some time between the beginning of a copy and the wait for it. Here each copy
happens at the last moment, in the wait, and its result is NaN until then. So what reads a result
too early, and what frees or overwrites a source too early, is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, library

from mstpass import gpus
from mstpass.graph import device_costs, loop_op
from mstpass.partition import build_problem
from mstpass.torch_internals import host_copy_ops

_LIBRARY = library.Library("mstpass_tests", "DEF")
for _op in (*host_copy_ops.all_ops(), host_copy_ops.ROWS_ON_HOST, host_copy_ops.COPY_ROWS):
    _LIBRARY.define(str(_op._schema).removeprefix("mstpass::"))


@dataclasses.dataclass
class Copies:
    """How many copies have been made in each direction, and those that are pending.

    Attributes:
        rows: how many copies of the rows of a chunk.
    """

    offloaded: int = 0
    reloaded: int = 0
    rows: int = 0
    pending: dict[int, tuple[weakref.ref[Tensor], Tensor]] = dataclasses.field(default_factory=dict)


_made = Copies()


def _begin(source: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        target.fill_(float("nan"))
    _made.pending[target.data_ptr()] = weakref.ref(source), target
    return target


def _offload(tensor: Tensor) -> Tensor:
    _made.offloaded += 1
    return _begin(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))


def _reload(tensor: Tensor, device: torch.device, stride: list[int] | None = None) -> Tensor:
    _made.reloaded += 1
    return _begin(tensor, host_copy_ops.on_device(tensor, device, stride))


def _wait(tensor: Tensor, last_use: Tensor) -> Tensor:
    reference, target = _made.pending.pop(tensor.data_ptr())
    source = reference()
    assert source is not None, "the source was freed before the wait for its copy"
    target.copy_(source)
    return tensor


def _rows_on_host(host: Tensor, device: torch.device) -> Tensor:
    raise AssertionError("all of the value is copied, not the rows of a chunk")


def _copy_rows(host: Tensor, start: int, length: int, device: torch.device) -> Tensor:
    assert host.data_ptr() not in _made.pending, "rows are read before the value is on the host"
    _made.rows += 1
    return host.narrow(0, start, length).clone()


for _name, _run, _fake in (
    ("offload", _offload, host_copy_ops.fake_offload),
    ("reload", _reload, host_copy_ops.on_device),
    ("wait_tensor", _wait, host_copy_ops.fake_wait),
    ("rows_on_host", _rows_on_host, host_copy_ops.fake_value),
    ("copy_rows", _copy_rows, host_copy_ops.fake_rows),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    library.register_fake(f"mstpass_tests::{_name}", _fake, lib=_LIBRARY)


@contextlib.contextmanager
def host_on_cpu(bytes_per_us: float = 1e4, least_bytes: int = 1) -> Iterator[Copies]:
    """In here a step on the CPU has host memory beside it, at a given speed."""
    ops = torch.ops.mstpass_tests
    _made.__init__()  # type: ignore[misc]
    with contextlib.ExitStack() as stack:

        def patch(module: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        patch(host_copy_ops, "OFFLOAD", ops.offload.default)
        patch(host_copy_ops, "RELOAD", ops.reload.default)
        patch(host_copy_ops, "WAIT", ops.wait_tensor.default)
        patch(host_copy_ops, "ROWS_ON_HOST", ops.rows_on_host.default)
        patch(host_copy_ops, "COPY_ROWS", ops.copy_rows.default)
        patch(loop_op, "DEVICE_TYPE", "cpu")
        patch(build_problem, "LEAST_OFFLOADED_BYTES", least_bytes)
        kind = dataclasses.replace(gpus.gpu(gpus.DEFAULT), host_bytes_per_us=bytes_per_us)
        patch(device_costs, "kind_of_gpu", lambda device: kind)
        yield _made
        assert not _made.pending, "copies that nothing has waited for"
