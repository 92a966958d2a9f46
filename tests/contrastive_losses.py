"""Losses of which a value needs what is reduced over all tokens, and what mst makes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS = 16, 211  # a prime number: the last chunk is ragged


class Pairs(nn.Module):
    """Two towers with a temperature and a bias, and prototypes."""

    def __init__(self, prototypes: int = 256):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-1.0))
        self.prototypes = nn.Linear(WIDTH, prototypes, bias=False)

    def embed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        u, v = self.embed(x, y)
        return self.scale.exp().to(u.dtype) * (u @ v.t())


Loss = Callable[[Pairs, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A loss of two batches of rows.

    Attributes:
        loops: how many loops it becomes.
        mode: of its region; "recompute" if the backward has rounds of its own.
        rows: of the second batch.
    """

    loss: Loss
    loops: int
    mode: str = "fused"
    rows: int = TOKENS


def _labels(x: Tensor, first: int = 0) -> Tensor:
    return torch.arange(first, first + x.shape[0], device=x.device)


def clip(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return (F.cross_entropy(logits, _labels(x)) + F.cross_entropy(logits.t(), _labels(x))) / 2


def clip_with_bias(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y) + model.bias
    return F.cross_entropy(logits, _labels(x)) + F.cross_entropy(logits.t(), _labels(x))


def one_direction(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(x, y), _labels(x))


def smoothed(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits, labels = model.logits(x, y), _labels(x)
    rows = F.cross_entropy(logits, labels, label_smoothing=0.1)
    return rows + F.cross_entropy(logits.t(), labels, label_smoothing=0.1)


def of_local_rows(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    """Rows of one rank against those of all; columns are normalized over the rows at hand."""
    logits = model.logits(x, y)
    labels = _labels(x, 64)
    columns = logits.logsumexp(0).mean() - logits.gather(1, labels[:, None]).mean()
    return F.cross_entropy(logits, labels) + columns


def softmax_of_columns(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    """Inductor divides the exponents by the temperature after the maximum, if all are finite."""
    shares = F.log_softmax(model.logits(x, y), 0)
    return -shares.gather(1, _labels(x)[:, None]).mean()


def hard_negatives(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    """More columns than rows: those of pairs come first."""
    logits = model.logits(x, y)
    pairs = logits[:, : x.shape[0]].t()
    return F.cross_entropy(logits, _labels(x)) + F.cross_entropy(pairs, _labels(x))


def centred(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return F.cross_entropy(logits - logits.mean(0), _labels(x))


def centred_by_constants(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return F.cross_entropy(logits - logits.mean(0).detach(), _labels(x))


def scaled_by_the_largest(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return F.cross_entropy(logits / logits.abs().max().detach(), _labels(x))


def standardized(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    scores = model.prototypes(x)
    scores = (scores - scores.mean(0)) / (scores.std(0) + 1e-3)
    return F.cross_entropy(scores, _labels(x))


def balanced(model: Pairs, x: Tensor, y: Tensor, times: int) -> Tensor:
    """SwAV: targets of one view are balanced over rows and prototypes, by Sinkhorn and Knopp."""
    u, v = model.embed(x, y)
    scores, others = model.prototypes(u), model.prototypes(v)
    with torch.no_grad():
        q = (others / 0.5).exp()
        q = q / q.sum()
        for _ in range(times):
            q = q / q.sum(0, keepdim=True) / q.shape[1]
            q = q / q.sum(1, keepdim=True) / q.shape[0]
        q = q * q.shape[0]
    return -(q * F.log_softmax(scores / 0.1, -1)).sum(-1).mean()


def sinkhorn(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    return balanced(model, x, y, 3)


TAKEN: dict[str, Case] = {
    "clip": Case(clip, 2),
    "clip with bias": Case(clip_with_bias, 2),
    "smoothed": Case(smoothed, 2),
    "one direction": Case(one_direction, 1),
    "of local rows": Case(of_local_rows, 2, rows=512),
    "softmax of columns": Case(softmax_of_columns, 3),
    "hard negatives": Case(hard_negatives, 2, rows=300),
    "centred": Case(centred, 4, "recompute"),
    "centred by constants": Case(centred_by_constants, 2),
    "scaled by the largest": Case(scaled_by_the_largest, 2),
    "standardized": Case(standardized, 5, "recompute"),
    "sinkhorn": Case(sinkhorn, 5),
}


# ---- what no chunk can give a part of ------------------------------------------------------------
def median_of_columns(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return F.cross_entropy(logits - logits.median(0).values.detach(), _labels(x))


def cumulative(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(x, y).cumsum(0), _labels(x))


def product_of_columns(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return F.cross_entropy(logits * logits.prod(0).detach(), _labels(x))


def best_rows(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return F.cross_entropy(logits, logits.argmax(0))


def most_similar_rows(model: Pairs, x: Tensor, y: Tensor) -> Tensor:
    return model.logits(x, y).max(0).values.mean()


REFUSED: dict[str, tuple[Loss, str]] = {
    "median": (median_of_columns, "median.dim reduces over all tokens"),
    "cumulative": (cumulative, "cumsum.default works along a token dim"),
    "product": (product_of_columns, "prod.dim_int reduces over all tokens"),
    "best rows": (best_rows, "argmax.default reduces over all tokens"),
    "most similar rows": (most_similar_rows, "max.dim reduces over all tokens"),
}
