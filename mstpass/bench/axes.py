"""`mstpass bench axes`: losses and layers whose loops run along different axes.

Chunks of tokens, sections of a vocabulary or of hidden features, and rounds of both: each case is
measured under Inductor alone, and under mst without a budget and at the least memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mstpass.bench import axes_models, comparison, figures
from mstpass.bench.comparison import INDUCTOR, MST, inductor, mst
from mstpass.bench.figures import Row
from mstpass.bench.harness import Arguments, Benchmark, Progress
from mstpass.bench.models import Head, LossFn, MLPs, Step, made_on
from mstpass.bench.results import Result, Table, mib_cell, ratio_cell, times_cell

BUDGET_0 = "mst, memory_budget=0.0"
_BUDGETS = {MST: "free", BUDGET_0: "0.0"}
_IN_BFLOAT16 = {"value_tolerance": 0.01, "gradient_tolerance": 0.05}
_DESCRIPTION = """\
Measure losses and layers whose loops run along different axes (tokens,
the vocabulary, hidden features) and in rounds: peak and step time of mst
without a budget and at the least memory, against Inductor."""
EXAMPLES = """  mstpass bench axes
  mstpass bench axes --model "contrastive, both ways" --model Medusa
  mstpass bench axes --repeats 3 --markdown docs/results/axes.md
"""

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
class Work:
    """What is computed, and the step that a function which computes it is made into."""

    fn: LossFn
    step: Callable[[LossFn], Step]


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
    tolerances: Mapping[str, float] = field(default_factory=dict)


def run(arguments: Arguments) -> Result:
    sizes = QUICK if arguments.quick else Sizes()
    names = arguments.models(CASES)
    result = Result("axes", "Loops along different axes")
    lines: list[tuple[str, ...]] = []
    with Progress("axes", len(names) * 3 * (2 + arguments.repeats)) as advance:
        for name in names:
            case = CASES[name]
            work = case.build(sizes, arguments.device)
            rows = comparison.compare(
                [inductor(), mst(), mst(BUDGET_0, memory_budget=0.0)],
                work.fn,
                work.step,
                repeats=arguments.repeats,
                device=arguments.device,
                advance=advance,
                **case.tolerances,
            )
            lines += _lines(f"{name}: {case.shapes.format(**dataclasses.asdict(sizes))}", rows)
            limits = case.peak_limit, case.time_limit
            what = f"{name}: {{}} / Inductor"
            result.targets += figures.peak_and_time_targets(
                what, rows[BUDGET_0], rows[INDUCTOR], *limits
            )
            result.records[name] = figures.records(rows)
    columns = ("", "budget", "Inductor MiB", "mst MiB", "peak / Inductor", "time / Inductor")
    result.tables.append(Table("steps", (*columns, "estimated", "loops"), tuple(lines)))
    result.notes.append(
        f"{figures.ROUNDS} Loops: what each runs along, and the number of its chunks; targets: of "
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
            times_cell(figures.peak_ratio(rows[name], base)),
            rows[name].error or ratio_cell(figures.ratios(rows[name], base)),
            figures.estimate_cell(rows[name], base),
            rows[name].axes or "none",
        )
        for name, budget in _BUDGETS.items()
    ]


# ---- cases -------------------------------------------------------------------------------------
def _head(sizes: Sizes, device: torch.device) -> Work:
    shape = sizes.tokens, sizes.head_width, sizes.head_words
    head = Head.build(*shape, device, torch.bfloat16)
    return Work(head.loss, head.step)


def _mlp(sizes: Sizes, device: torch.device) -> Work:
    shape = sizes.tokens, sizes.head_width, sizes.mlp_width, 1
    mlps = MLPs.build(*shape, device, torch.bfloat16)
    return Work(mlps.value, mlps.step)


def _loss(make: Make, sizes: Sizes, device: torch.device) -> Work:
    """The step of what ``make`` returns, with gradients of all weights that are trained."""
    torch.manual_seed(0)
    with made_on(device, torch.float32):
        module, inputs = make(sizes)
    leaves = [each for each in module.parameters() if each.requires_grad]
    return Work(lambda: module(*inputs), lambda fn: Step(fn, leaves))


def _contrastive(sizes: Sizes) -> Made:
    return axes_models.Contrastive(sizes.width), tuple(torch.randn(2, sizes.pairs, sizes.width))


def _late_interaction(sizes: Sizes) -> Made:
    width = sizes.width // 2
    queries = torch.randn(sizes.queries, sizes.query_length, width)
    documents = torch.randn(sizes.queries, sizes.document_length, width)
    return axes_models.LateInteraction(width), (queries, documents)


def _stacked_heads(sizes: Sizes) -> Made:
    model = axes_models.StackedHeads(sizes.heads, sizes.width, sizes.words)
    return model, (_hidden(sizes), torch.randint(sizes.words, (sizes.heads, sizes.tokens)))


def _two_passes(sizes: Sizes) -> Made:
    masks = (torch.rand(2 * sizes.tokens, sizes.width) > 0.1) / 0.9
    target = torch.randint(sizes.words, (sizes.tokens,))
    return axes_models.TwoPasses(sizes.width, sizes.words), (_hidden(sizes), target, masks)


def _chunked_by_hand(sizes: Sizes) -> Made:
    model = axes_models.ChunkedByHand(sizes.width, sizes.words, sizes.parts)
    hidden = torch.randn(2 * sizes.tokens, sizes.width)
    return model, (hidden, torch.randint(sizes.words, (2 * sizes.tokens,)))


def _jensen_shannon(sizes: Sizes) -> Made:
    kept = torch.randperm(sizes.tokens)[: sizes.kept].sort().values
    return axes_models.JensenShannon(sizes.width, sizes.words), (_hidden(sizes), kept)


def _self_distillation(sizes: Sizes) -> Made:
    model = axes_models.SelfDistillation(sizes.image_width, sizes.outputs, sizes.views)
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
    "head": Case(_head, _HEAD + "V={head_words}, bf16", 0.42, 1.6, _IN_BFLOAT16),
    "SwiGLU MLP": Case(_mlp, _HEAD + "l={mlp_width}, bf16", 0.7, 1.5, _IN_BFLOAT16),
    "contrastive, both ways": _of_loss(_contrastive, "{pairs} pairs, d={width}, fp32", 0.25, 1.25),
    "ColBERT": _of_loss(_late_interaction, _TEXTS, 0.4, 1.6),
    "Medusa": _of_loss(_stacked_heads, "{heads} heads in one weight, " + _TOKENS, 0.4, 1.4),
    "R-Drop": _of_loss(_two_passes, "pairs of passes, " + _TOKENS, 0.4, 2.1),
    "chunked by hand": _of_loss(_chunked_by_hand, _PARTS, 0.4, 1.8),
    "Jensen-Shannon": _of_loss(_jensen_shannon, "{kept} tokens kept, " + _TOKENS, 0.4, 2.6),
    "DINO": _of_loss(_self_distillation, _IMAGES, 0.5, 1.6),
}


main = Benchmark("axes", (run,), _DESCRIPTION, EXAMPLES, options=("model",))
