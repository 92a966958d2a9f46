"""FSDP2 around a model, compiled in every way that people do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from tests.ranks import steps

compiled = functools.partial(torch.compile, backend="mst", options={"strict": True})


def sharded(module: steps.Model, **how: Any) -> steps.Model:
    for layer in module.layers:
        fully_shard(layer, **how)
    return fully_shard(module, **how)


def blocks(module):
    for layer in module.layers:
        layer.compile(backend="mst", options={"strict": True})
    module.head_and_loss = compiled(module.head_and_loss)
    return module


def num_gathers(step: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    return sum(e.count for e in profiler.key_averages() if e.key == "c10d::_allgather_base_")


def tried(build=lambda m: m, compile=compiled, step=None, **how: Any) -> dict[str, Any]:
    def one(build_step):
        module = sharded(build(steps.model()), **how)
        fn = build_step(module)
        run = lambda: step(module, fn) if step else fn(*steps.batch()).backward()
        reports = steps.reports_of(run)
        first = steps.gradients(module)
        module.zero_grad()
        gathers = num_gathers(run)
        module.zero_grad()
        peak = steps.peak_bytes(run)
        return first, reports, gathers, peak

    right, _, g0, p0 = one(lambda m: m)
    found, reports, gathers, peak = one(compile)
    return {"error": steps.error(found, right), "reports": reports, "gathers": [g0, gathers], "peaks": [p0, peak]}


def whole(): return tried()
def per_block(): return tried(compile=blocks)
def mixed(): return tried(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
def kept(): return tried(reshard_after_forward=False)
def resharded(): return tried(reshard_after_forward=True)
def offloaded(): return tried(offload_policy=CPUOffloadPolicy(pin_memory=False))


def accumulated():
    def step(module, fn):
        module.set_requires_gradient_sync(False)
        fn(*steps.batch(seed=1)).backward()
        module.set_requires_gradient_sync(True)
        fn(*steps.batch(seed=2)).backward()
    return tried(step=step)


def checkpointed():
    def build(m):
        for i, layer in enumerate(m.layers):
            m.layers[i] = checkpoint_wrapper(layer)
        return m
    return tried(build)


def lengths():
    def step(module, fn):
        for k in range(3):
            fn(*steps.batch(512 + 256 * ((k + dist.get_rank()) % 3), seed=k)).backward()
    return tried(step=step)


def lengths_dynamic():
    def step(module, fn):
        for k in range(3):
            fn(*steps.batch(512 + 256 * ((k + dist.get_rank()) % 3), seed=k)).backward()
    return tried(step=step, compile=functools.partial(compiled, dynamic=True))
