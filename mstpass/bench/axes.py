"""Measure losses and layers whose loops run along different axes (tokens,
the vocabulary, hidden features) and in rounds: peak and step time of mst
without a budget and at the least memory, against Inductor.

Chunks of tokens, sections of a vocabulary or of hidden features, and rounds of both: each case is
measured under Inductor alone, and under mst without a budget and at the least memory.

Shapes: N tokens, D width, V vocabulary, B batch. Each loss is a module: its inputs are what it is
called with.

examples:
  mstpass bench axes
  mstpass bench axes --model "contrastive, both ways" --model Medusa
  mstpass bench axes --repeats 3 --markdown docs/results/axes.md
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.bench import comparison, results
from mstpass.bench.comparison import INDUCTOR, MST, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.models import Head, MLPs, Work, made_on
from mstpass.bench.results import Result, Row, Table, mib_cell, ratio_cell, times_cell


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


class WithHead(nn.Module):
    """A layer and an LM head. Subclasses have the loss."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)


class TwoPasses(WithHead):
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


class ChunkedByHand(WithHead):
    """Cross-entropy over parts of the tokens, in a Python loop."""

    def __init__(self, width: int, vocabulary: int, parts: int):
        super().__init__(width, vocabulary)
        self.parts = parts

    def forward(self, x_ND: Tensor, target_N: Tensor) -> Tensor:
        parts = zip(self.hidden(x_ND).chunk(self.parts), target_N.chunk(self.parts), strict=True)
        sums = [F.cross_entropy(self.head(x), target, reduction="sum") for x, target in parts]
        return torch.stack(sums).sum() / len(target_N)


class JensenShannon(WithHead):
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


# ---- the benchmark -------------------------------------------------------------------------------
BUDGET_0 = "mst, memory_budget=0.0"
_BUDGETS = {MST: "free", BUDGET_0: "0.0"}
_IN_BFLOAT16 = (0.01, 0.05)  # the largest relative errors

Made = tuple[nn.Module, tuple[Tensor, ...]]  # a module that returns its loss, and its inputs


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases.

    Attributes:
        width, words: those of the losses in fp32; other names begin with what they belong to.
        kept: tokens that the divergence of two heads keeps.
    """

    tokens: int = 1024
    width: int = 256
    words: int = 8000
    head_width: int = 512
    head_words: int = 16_032
    mlp_width: int = 2048
    pairs: int = 4096
    queries: int = 64
    query_length: int = 32
    document_length: int = 128
    heads: int = 4
    parts: int = 4
    kept: int = 768
    images: int = 64
    views: int = 8
    image_width: int = 128
    outputs: int = 16_384


Make = Callable[[Sizes], Made]
QUICK = Sizes(128, 32, 512, 32, 1024, 256, 256, 8, 8, 32, 3, 4, 96, 16, 4, 32, 1024)


@dataclass(frozen=True)
class Case:
    """A loss or a layer.

    Attributes:
        shapes: its sizes, as text with fields of `Sizes` in braces.
        peak_limit, time_limit: targets of the least memory, relative to Inductor.
    """

    build: Callable[[Sizes, torch.device], Work]
    shapes: str
    peak_limit: float
    time_limit: float


def run(arguments: Arguments) -> Result:
    sizes = QUICK if arguments.quick else Sizes()
    names = arguments.models(CASES)
    result = Result("axes", "Loops along different axes")
    lines: list[tuple[str, ...]] = []
    with advancing("axes", len(names) * 3 * (2 + arguments.repeats)) as advance:
        for name in names:
            case = CASES[name]
            work = case.build(sizes, arguments.device)
            contenders = [inductor(), mst(), mst(BUDGET_0, memory_budget=0.0)]
            rows = comparison.compare(contenders, work, arguments, advance)
            lines += _lines(f"{name}: {case.shapes.format(**dataclasses.asdict(sizes))}", rows)
            limits = case.peak_limit, case.time_limit
            what = f"{name}: {{}} / Inductor"
            result.targets += results.peak_and_time_targets(
                what, rows[BUDGET_0], rows[INDUCTOR], *limits
            )
            result.records[name] = results.records(rows)
    columns = ("", "budget", "Inductor MiB", "mst MiB", "peak / Inductor", "time / Inductor")
    result.tables.append(Table("steps", (*columns, "estimated", "loops"), tuple(lines)))
    result.notes.append(
        f"{results.ROUNDS} Loops: what each runs along, and the number of its chunks; targets: of "
        "memory_budget=0.0."
    )
    return result


def _lines(title: str, rows: Mapping[str, Row]) -> list[tuple[str, ...]]:
    base = rows[INDUCTOR]
    return [
        (
            title if name == MST else "",
            budget,
            mib_cell(base.peak_bytes),
            mib_cell(rows[name].peak_bytes),
            times_cell(results.peak_ratio(rows[name], base)),
            rows[name].error or ratio_cell(results.ratios(rows[name], base)),
            results.estimate_cell(rows[name], base),
            rows[name].axes or "none",
        )
        for name, budget in _BUDGETS.items()
    ]


# ---- cases -------------------------------------------------------------------------------------
def _head(sizes: Sizes, device: torch.device) -> Work:
    shape = sizes.tokens, sizes.head_width, sizes.head_words
    return Head.build(*shape, device, torch.bfloat16).work(tolerances=_IN_BFLOAT16)


def _mlp(sizes: Sizes, device: torch.device) -> Work:
    shape = sizes.tokens, sizes.head_width, sizes.mlp_width, 1
    return MLPs.build(*shape, device, torch.bfloat16).work(tolerances=_IN_BFLOAT16)


def _loss(make: Make, sizes: Sizes, device: torch.device) -> Work:
    """The step of what ``make`` returns, with gradients of all weights that are trained."""
    torch.manual_seed(0)
    with made_on(device, torch.float32):
        module, inputs = make(sizes)
    return Work.of(module, lambda: module(*inputs))


def _contrastive(sizes: Sizes) -> Made:
    return Contrastive(sizes.width), tuple(torch.randn(2, sizes.pairs, sizes.width))


def _late_interaction(sizes: Sizes) -> Made:
    width = sizes.width // 2
    queries = torch.randn(sizes.queries, sizes.query_length, width)
    documents = torch.randn(sizes.queries, sizes.document_length, width)
    return LateInteraction(width), (queries, documents)


def _stacked_heads(sizes: Sizes) -> Made:
    model = StackedHeads(sizes.heads, sizes.width, sizes.words)
    return model, (_hidden(sizes), torch.randint(sizes.words, (sizes.heads, sizes.tokens)))


def _two_passes(sizes: Sizes) -> Made:
    masks = (torch.rand(2 * sizes.tokens, sizes.width) > 0.1) / 0.9
    target = torch.randint(sizes.words, (sizes.tokens,))
    return TwoPasses(sizes.width, sizes.words), (_hidden(sizes), target, masks)


def _chunked_by_hand(sizes: Sizes) -> Made:
    model = ChunkedByHand(sizes.width, sizes.words, sizes.parts)
    hidden = torch.randn(2 * sizes.tokens, sizes.width)
    return model, (hidden, torch.randint(sizes.words, (2 * sizes.tokens,)))


def _jensen_shannon(sizes: Sizes) -> Made:
    kept = torch.randperm(sizes.tokens)[: sizes.kept].sort().values
    return JensenShannon(sizes.width, sizes.words), (_hidden(sizes), kept)


def _self_distillation(sizes: Sizes) -> Made:
    model = SelfDistillation(sizes.image_width, sizes.outputs, sizes.views)
    views = torch.randn(sizes.views * sizes.images, sizes.image_width)
    return model, (views, torch.randn(2 * sizes.images, sizes.image_width))


def _hidden(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.tokens, sizes.width)


def _of_loss(make: Make, shapes: str, peak_limit: float, time_limit: float) -> Case:
    return Case(functools.partial(_loss, make), shapes, peak_limit, time_limit)


_HEAD = "N={tokens}, d={head_width}, "
_TOKENS = "N={tokens}, d={width}, V={words}, fp32"
_PARTS = "{parts} parts, N=2 x {tokens}, d={width}, V={words}, fp32"
_TEXTS = "{queries} queries of {query_length} tokens x {queries} documents of {document_length}"
_IMAGES = "{images} images, {views} views, d={image_width}, {outputs} outputs, fp32"
CASES: dict[str, Case] = {
    "head": Case(_head, _HEAD + "V={head_words}, bf16", 0.42, 1.6),
    "SwiGLU MLP": Case(_mlp, _HEAD + "l={mlp_width}, bf16", 0.7, 1.5),
    "contrastive, both ways": _of_loss(_contrastive, "{pairs} pairs, d={width}, fp32", 0.25, 1.25),
    "ColBERT": _of_loss(_late_interaction, _TEXTS, 0.4, 1.6),
    "Medusa": _of_loss(_stacked_heads, "{heads} heads in one weight, " + _TOKENS, 0.4, 1.4),
    "R-Drop": _of_loss(_two_passes, "pairs of passes, " + _TOKENS, 0.4, 2.1),
    "chunked by hand": _of_loss(_chunked_by_hand, _PARTS, 0.4, 1.8),
    "Jensen-Shannon": _of_loss(_jensen_shannon, "{kept} tokens kept, " + _TOKENS, 0.4, 2.6),
    "DINO": _of_loss(_self_distillation, _IMAGES, 0.5, 1.6),
}


main = Benchmark("axes", (run,), __doc__, options=("model",))
