"""DDP around a model, compiled in every way that people do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import steps

compiled = functools.partial(torch.compile, backend="mst", options={"strict": True})
Build = Callable[[nn.Module], Callable[..., Tensor]]


def _tried(build: Build) -> dict[str, Any]:
    """Reports of a step, and the error of its gradients against eager DDP's."""
    module = steps.model()
    step = build(module)

    def run() -> None:
        loss = step(*steps.batch())
        if loss is not None:
            loss.backward()

    reports = steps.reports_of(run)
    return {"reports": reports, "error": steps.error(steps.gradients(module), _right())}


def _ddp(model: nn.Module, bucket_cap_mb: float = 1) -> DistributedDataParallel:
    """DDP with buckets so small that one of them ends inside of an MLP."""
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)


@functools.cache
def _right() -> list[Tensor]:
    module = steps.model()
    ddp = DistributedDataParallel(module)  # must live until the backward
    ddp(*steps.batch()).backward()
    return steps.gradients(module)


def outside() -> dict[str, Any]:
    """``torch.compile(DDP(model))``."""
    return _tried(lambda model: compiled(_ddp(model)))


def inside() -> dict[str, Any]:
    """``DDP(torch.compile(model))``."""
    return _tried(lambda model: _ddp(compiled(model)))


def in_place() -> dict[str, Any]:
    """``model.compile()``, then DDP."""

    def build(model: nn.Module) -> nn.Module:
        model.compile(backend="mst", options={"strict": True})
        return _ddp(model)

    return _tried(build)


def large_buckets() -> dict[str, Any]:
    """By default only the head's weight fills a bucket."""
    return _tried(lambda model: compiled(_ddp(model, bucket_cap_mb=25)))


def whole() -> dict[str, Any]:
    with torch._dynamo.config.patch(optimize_ddp=False):
        return _tried(lambda model: compiled(_ddp(model)))


def python_reducer() -> dict[str, Any]:
    """The backward is compiled as well, with its all-reduces in the graph."""
    how = {"optimize_ddp": "python_reducer", "compiled_autograd": True}

    def build(model: nn.Module) -> Callable[..., Any]:
        ddp = _ddp(model)

        def step(*batch: Tensor) -> None:
            ddp(*batch).backward()

        return compiled(step)

    captured = counters["compiled_autograd"]["captures"]
    with torch._dynamo.config.patch(**how):
        found = _tried(build)
    return {**found, "backwards": counters["compiled_autograd"]["captures"] - captured}


def loss_outside() -> dict[str, Any]:
    """The loss is computed from what DDP returns."""

    def build(model: nn.Module) -> Callable[..., Tensor]:
        ddp = _ddp(model)

        def step(ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(ddp(ids).flatten(0, 1), labels.flatten())

        return compiled(step)

    return _tried(build)


def overlap() -> dict[str, Any]:
    """What happens in which order: a gradient is there, or a bucket is being reduced."""
    events: list[str] = []
    model = steps.model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ddp = DistributedDataParallel(model)

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        reduced = "+".join(names[id(parameter)] for parameter in bucket.parameters())
        events.append(f"reduce {reduced}")
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, reduce)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: events.append(names[id(p)]))
    step = compiled(ddp)
    for _ in range(2):  # after the first step, DDP makes its buckets anew
        events.clear()
        model.zero_grad()
        step(*steps.batch()).backward()
    return {"events": events, "error": steps.error(steps.gradients(model), _right())}
