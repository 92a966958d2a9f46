"""A small language model with its loss inside, and what a rank tells of a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import mstpass
from mstpass.measure import peak_bytes
from tests import checks
from tests.models import TwoLayerMLP

WIDTH, VOCABULARY, TOKENS = 128, 4096, 1024


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.mlp = TwoLayerMLP(WIDTH, 6 * WIDTH, "relu", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Embedding, MLP blocks and head. Returns the loss, or the logits where no labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head_and_loss(x, labels)

    def head_and_loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(new: Callable[[], Model]) -> Model:
    """A new model, with the same weights on every rank."""
    torch.manual_seed(0)
    return new()


def model() -> Model:
    return made(Model)


def batch(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and labels of this rank, which no other rank has."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    ids = torch.randint(VOCABULARY, (1, tokens + 1), generator=random)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gradients(module: nn.Module) -> list[Tensor]:
    """This rank's gradients, or its shards of them."""
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return [g.to_local().clone() if isinstance(g, DTensor) else g.clone() for g in found]


def error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert len(found) == len(right) > 0
    nonzero = [(a, b) for a, b in zip(found, right, strict=True) if b.numel()]
    return max(checks.errors([a for a, _ in nonzero], [b for _, b in nonzero]))


def reports_of(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the reports say that a call makes."""
    before = len(mstpass.reports())
    step()
    return [summary(report) for report in mstpass.reports()[before:]]


def summary(report: mstpass.Report) -> dict[str, Any]:
    return {
        "regions": [[r.kind, r.mode, r.source, r.num_chunks] for r in report.regions],
        "rejections": [[r.source, r.reason, r.fix] for r in report.rejections],
        "notes": list(report.outcome.notes),
        "limit_bytes": report.outcome.limit_bytes,
        "text": str(report),
    }


def kinds(reports: Sequence[dict[str, Any]]) -> list[str]:
    return [region[0] for report in reports for region in report["regions"]]


__all__ = ["peak_bytes"]
