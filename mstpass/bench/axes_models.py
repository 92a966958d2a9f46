"""Losses and layers whose loops run along different axes, in plain PyTorch.

Shapes: N tokens, D width, V vocabulary, B batch. Each loss is a module: its inputs are what it is
called with.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Contrastive(nn.Module):
    """Pairs must find each other within the batch, in both directions (CLIP)."""

    def __init__(self, width: int):
        super().__init__()
        self.image, self.text = nn.Linear(width, width), nn.Linear(width, width)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image_BD: Tensor, text_BD: Tensor) -> Tensor:
        image_BD = F.normalize(self.image(image_BD), dim=-1)
        text_BD = F.normalize(self.text(text_BD), dim=-1)
        logits_BB = self.log_scale.exp() * image_BD @ text_BD.t()
        own = torch.arange(len(image_BD), device=image_BD.device)
        return (F.cross_entropy(logits_BB, own) + F.cross_entropy(logits_BB.t(), own)) / 2


class LateInteraction(nn.Module):
    """Each token of a query takes its most similar token of a document (ColBERT)."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.document = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, queries_QID: Tensor, documents_KJD: Tensor) -> Tensor:
        queries_QID = F.normalize(self.query(queries_QID), dim=-1)
        documents_KJD = F.normalize(self.document(documents_KJD), dim=-1)
        similar_QKIJ = torch.einsum("qid,kjd->qkij", queries_QID, documents_KJD)
        scores_QK = similar_QKIJ.amax(-1).sum(-1) / 0.05
        own = torch.arange(len(queries_QID), device=queries_QID.device)
        return F.cross_entropy(scores_QK, own)


class StackedHeads(nn.Module):
    """Heads for the next words, in one weight [heads, D, V] (Medusa)."""

    def __init__(self, heads: int, width: int, vocabulary: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(heads, width, vocabulary) * width**-0.5)

    def forward(self, x_ND: Tensor, target_HN: Tensor) -> Tensor:
        logits_HNV = torch.einsum("nd,hdv->hnv", self.hidden(x_ND), self.weight)
        return F.cross_entropy(logits_HNV.reshape(-1, logits_HNV.shape[-1]), target_HN.flatten())


class Head(nn.Module):
    """A layer and an LM head. Subclasses have the loss."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)


class TwoPasses(Head):
    """Each token twice, under two dropout masks, and the divergence of both passes (R-Drop).

    The masks are an input, so that all contenders drop the same.
    """

    def forward(self, x_ND: Tensor, target_N: Tensor, masks_MD: Tensor) -> Tensor:
        hidden_MD = self.hidden(torch.cat([x_ND, x_ND])) * masks_MD
        logits_MV = self.head(hidden_MD)
        first, second = (each.log_softmax(-1) for each in logits_MV.chunk(2))
        there = F.kl_div(first, second, reduction="batchmean", log_target=True)
        back = F.kl_div(second, first, reduction="batchmean", log_target=True)
        target_M = torch.cat([target_N, target_N])
        return F.cross_entropy(logits_MV, target_M) + (there + back) / 4


class ChunkedByHand(Head):
    """Cross-entropy over parts of the tokens, in a Python loop."""

    def __init__(self, width: int, vocabulary: int, parts: int):
        super().__init__(width, vocabulary)
        self.parts = parts

    def forward(self, x_ND: Tensor, target_N: Tensor) -> Tensor:
        parts = zip(self.hidden(x_ND).chunk(self.parts), target_N.chunk(self.parts), strict=True)
        sums = [F.cross_entropy(self.head(x), target, reduction="sum") for x, target in parts]
        return torch.stack(sums).sum() / len(target_N)


class JensenShannon(Head):
    """The divergence of a student's and a frozen teacher's words, of the tokens that are kept."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__(width, vocabulary)
        self.teacher = nn.Linear(width, vocabulary, bias=False).requires_grad_(False)

    def forward(self, x_ND: Tensor, kept_K: Tensor) -> Tensor:
        student = self.head(self.hidden(x_ND))[kept_K].log_softmax(-1)
        teacher = self.teacher(x_ND)[kept_K].log_softmax(-1)
        mixed = torch.logsumexp(torch.stack([student, teacher]), 0) - math.log(2)
        of = [
            F.kl_div(mixed, p, reduction="batchmean", log_target=True) for p in (student, teacher)
        ]
        return (of[0] + of[1]) / 2


class SelfDistillation(nn.Module):
    """Views of each image; a teacher whose outputs are centered by a moving average (DINO)."""

    center: Tensor
    next_center: Tensor

    def __init__(self, width: int, outputs: int, views: int):
        super().__init__()
        self.views = views
        self.hidden = nn.Linear(width, width)
        self.student = nn.Linear(width, outputs, bias=False)
        self.teacher = nn.Linear(width, outputs, bias=False).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, outputs))
        # beside the center, so that equal steps have equal results
        self.register_buffer("next_center", torch.zeros(1, outputs))

    def forward(self, views: Tensor, two_views: Tensor) -> Tensor:
        teacher = self.teacher(two_views)
        targets = F.softmax((teacher - self.center) / 0.04, -1).chunk(2)
        given = F.log_softmax(self.student(self.hidden(views)) / 0.1, -1).chunk(self.views)
        pairs = [(t, s) for i, t in enumerate(targets) for j, s in enumerate(given) if i != j]
        with torch.no_grad():
            self.next_center.copy_(self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1)
        return torch.stack([-(t * s).sum(-1).mean() for t, s in pairs]).mean()
