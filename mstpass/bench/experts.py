"""Measure layers of experts under Inductor and under mst at several budgets: with
sorted rows, with a capacity for each expert, and with all tokens for every expert.

Either the rows are sorted by expert, and the products of all experts run by one op, as in
transformers; or the products are a batch of matrices, one for each expert.

examples:
  mstpass bench experts
  mstpass bench experts --quick
"""

from __future__ import annotations

import dataclasses
import functools
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.bench import comparison, results
from mstpass.bench.comparison import INDUCTOR, eager, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import Work
from mstpass.bench.results import Result
from mstpass.errors import require

BUDGETS = ("free", 0.5, 0.0)
PEAK_LIMIT, TIME_LIMIT = 0.35, 1.05


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of the layer and of its batch: B = 1."""

    width: int = 256
    hidden: int = 512
    experts: int = 8
    best: int = 2
    length: int = 8192

    def __str__(self) -> str:
        return (
            f"d={self.width}, {self.experts} experts, top-{self.best}, l={self.hidden}, "
            f"N={self.length}, fp32"
        )


QUICK = Size(64, 128, 4, 2, 512)


class Experts(nn.Module):
    """SwiGLU experts after a softmax over all of them. Shapes: x (N, d)."""

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.router = nn.Linear(size.width, size.experts, bias=False)
        shape = size.experts, size.width, 2 * size.hidden
        self.up = nn.Parameter(torch.randn(shape) / size.width**0.5)
        shape = size.experts, size.hidden, size.width
        self.down = nn.Parameter(torch.randn(shape) / size.hidden**0.5)

    def scores(self, x: Tensor) -> Tensor:
        """Shape: (N, E)."""
        return self.router(x).softmax(-1)


class SortedRows(Experts):
    """The rows of the best experts of each token, sorted by expert."""

    def __init__(self, size: Size):
        require(("transformers",), "hf", "mstpass bench experts")
        import_module("transformers.integrations.moe")  # it registers the op
        super().__init__(size)

    def forward(self, x: Tensor) -> Tensor:
        product, best = torch.ops.transformers.grouped_mm_fallback, self.size.best
        weights, choice = self.scores(x).topk(best, dim=-1)
        expert, order = choice.flatten().sort()
        ends = torch.histc(expert.float(), self.size.experts, 0, self.size.experts - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        gate, up = product(x[order // best], self.up, ends).chunk(2, -1)
        down = product(F.silu(gate) * up, self.down, ends)
        down = down * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return down[back].view(-1, best, x.shape[-1]).sum(1)


class BatchedExperts(Experts):
    """Experts that all have as many rows."""

    def products(self, rows: Tensor) -> Tensor:
        """Shapes: rows (E, C, d), result (E, C, d)."""
        gate, up = torch.bmm(rows, self.up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down)


class Capacity(BatchedExperts):
    """Every expert takes the tokens with the highest scores, as many as its capacity."""

    def forward(self, x: Tensor) -> Tensor:
        capacity = len(x) * self.size.best // self.size.experts
        weights, chosen = self.scores(x).t().topk(capacity, dim=-1)
        found = self.products(x[chosen]) * weights[..., None]
        return torch.zeros_like(x).index_add(0, chosen.flatten(), found.flatten(0, 1))


class AllTokens(BatchedExperts):
    """Every expert gets all tokens, scaled by their scores, as in Llama 4."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.repeat(self.size.experts, 1) * self.scores(x).t().reshape(-1, 1)
        return self.products(rows.view(self.size.experts, *x.shape)).sum(0)


def _run(layer: type[Experts], key: str, title: str, arguments: Arguments) -> Result:
    size = QUICK if arguments.quick else Size()
    torch.manual_seed(0)
    model = layer(size).to(arguments.device)
    x = torch.randn(size.length, size.width, device=arguments.device, requires_grad=True)
    ours = {budget: mst(f"mst, memory_budget={budget}", memory_budget=budget) for budget in BUDGETS}
    work = Work.of(model, lambda: model(x).square().mean(), x)
    contenders = [eager(), inductor(), *ours.values()]
    rows = comparison.measured(key, contenders, work, arguments)
    base, least = rows[INDUCTOR], rows[ours[0.0].name]
    result = Result(key, f"{title}: {size}")
    result.tables.append(results.steps_table("steps", rows.values(), base))
    what = "memory_budget=0.0: {} / Inductor"
    result.targets += results.peak_and_time_targets(what, least, base, PEAK_LIMIT, TIME_LIMIT)
    result.notes.append(results.ROUNDS)
    result.records["rows"] = results.records(rows)
    return result


LAYERS = (
    (SortedRows, "experts", "A layer of experts, sorted rows"),
    (
        Capacity,
        "experts-capacity",
        "A layer of experts, each with a capacity of N * top / experts rows",
    ),
    (AllTokens, "experts-all-tokens", "A layer of experts, all tokens for each"),
)
_RUNS = [functools.partial(_run, *layer) for layer in LAYERS]
main = Benchmark("experts", _RUNS, __doc__)
