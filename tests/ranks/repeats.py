"""Plans that let backward exchange heads again, and ranks that do not compile alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mstpass
from mstpass.torch_internals import collectives
from tests.ranks import steps
from tests.ranks.parallel_cases import Attention, D, ulysses_attention

LAYERS = 3


def _model() -> nn.Module:
    return nn.Sequential(*(Attention(ulysses_attention) for _ in range(LAYERS)))


def _gradients(compiled: bool, **options: Any) -> list[Tensor]:
    model = _model()

    def loss(x: Tensor) -> Tensor:
        return model(x).sin().sum()  # type: ignore[no-any-return]

    options = {"memory_budget": 0.0, "strict": True, **options}
    fn = torch.compile(loss, backend="mst", options=options) if compiled else loss
    torch.manual_seed(dist.get_rank())
    fn(torch.randn(1, 256, D)).backward()
    return steps.gradients(model)


def _tried(**options: Any) -> dict[str, Any]:
    right = _gradients(False)
    found = _gradients(True, **options)
    outcome = mstpass.reports()[-1].outcome
    assert outcome.collectives is not None
    return {
        "error": steps.error(found, right),
        "repeated": outcome.collectives.repeated,
        "order": outcome.collectives.order,
        "notes": [note for note in outcome.notes if "collective" in note],
        "simulated": outcome.peak_bytes,
    }


def alike() -> dict[str, Any]:
    return _tried()


def off() -> dict[str, Any]:
    return _tried(repeat_collectives="off")


def apart() -> dict[str, Any]:
    """One rank has memory enough to repeat nothing."""
    return _tried(memory_budget=0.0 if dist.get_rank() == 0 else "free")


def alone() -> dict[str, Any]:
    """One rank runs the same step without a compiler."""
    collectives.PATIENCE_S = 3.0
    if dist.get_rank() == 0:
        return _tried()
    right = _gradients(False)
    return {"error": steps.error(_gradients(False), right)}
