"""DDP around a model, compiled in every way that people do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import steps

OPTIONS = {"strict": True}
SMALL_MB = 1


def _right(**sizes: int) -> list[Tensor]:
    module = steps.model(**sizes)
    DistributedDataParallel(module)(*steps.batch()).backward()
    return steps.gradients(module)


def _tried(build: Callable[[nn.Module], Callable[..., Tensor]], **sizes: int) -> dict[str, Any]:
    module = steps.model(**sizes)
    step = build(module)
    reports = steps.reports_of(lambda: step(*steps.batch()).backward())
    found = steps.gradients(module)
    return {"reports": reports, "error": steps.error(found, _right(**sizes))}


def outside() -> dict[str, Any]:
    """``torch.compile(DDP(model))``."""
    return _tried(lambda m: torch.compile(DistributedDataParallel(m), backend="mst", options=OPTIONS))


def inside() -> dict[str, Any]:
    """``DDP(torch.compile(model))``."""
    return _tried(lambda m: DistributedDataParallel(torch.compile(m, backend="mst", options=OPTIONS)))


def in_place() -> dict[str, Any]:
    """``model.compile()``, then DDP."""
    def build(m):
        m.compile(backend="mst", options=OPTIONS)
        return DistributedDataParallel(m)
    return _tried(build)


def split() -> dict[str, Any]:
    return _tried(lambda m: torch.compile(DistributedDataParallel(m, bucket_cap_mb=SMALL_MB), backend="mst", options=OPTIONS))


def whole() -> dict[str, Any]:
    with torch._dynamo.config.patch(optimize_ddp=False):
        return _tried(lambda m: torch.compile(DistributedDataParallel(m, bucket_cap_mb=SMALL_MB), backend="mst", options=OPTIONS))
