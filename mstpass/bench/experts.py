"""`mstpass bench experts`: a layer of experts, forward and backward.

The rows are sorted by expert, and the products of all experts run by one op, as in transformers.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import INDUCTOR, compare, eager, inductor, mst, ratios, records
from mstpass.bench.estimates import peaks_and_times
from mstpass.bench.models import Step
from mstpass.bench.tables import Result, Target
from mstpass.errors import require

BUDGETS = ("free", 0.5, 0.0)
PEAK_LIMIT, TIME_LIMIT = 0.35, 1.05
_DESCRIPTION = """\
Measure a layer of experts under Inductor and under mst at several budgets."""
EXAMPLES = """  mstpass bench experts
  mstpass bench experts --quick
"""


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
        shape = size.experts, 2 * size.hidden, size.width
        self.up = nn.Parameter(torch.randn(shape) / size.width**0.5)
        shape = size.experts, size.width, size.hidden
        self.down = nn.Parameter(torch.randn(shape) / size.hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        product, best = torch.ops.transformers.grouped_mm_fallback, self.size.best
        weights, choice = self.router(x).softmax(-1).topk(best, dim=-1)
        expert, order = choice.flatten().sort()
        ends = torch.histc(expert.float(), self.size.experts, 0, self.size.experts - 1)
        ends = ends.cumsum(0, dtype=torch.int32)
        gate, up = product(x[order // best], self.up.transpose(1, 2), ends).chunk(2, -1)
        down = product(F.silu(gate) * up, self.down.transpose(1, 2), ends)
        down = down * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return down[back].view(-1, best, x.shape[-1]).sum(1)


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench experts")
    from transformers.integrations import moe  # it registers the op

    assert moe
    size = QUICK if arguments.quick else Size()
    torch.manual_seed(0)
    model = Experts(size).to(arguments.device)
    x = torch.randn(size.length, size.width, device=arguments.device, requires_grad=True)
    ours = {budget: mst(f"mst, memory_budget={budget}", memory_budget=budget) for budget in BUDGETS}
    contenders = [eager(), inductor(), *ours.values()]
    with Progress("experts", len(contenders) * (2 + arguments.repeats)) as advance:
        rows = compare(
            contenders,
            lambda: model(x).square().mean(),
            lambda fn: Step(fn, [x, *model.parameters()]),
            repeats=arguments.repeats,
            device=arguments.device,
            advance=advance,
        )
    base, least = rows[INDUCTOR], rows[ours[0.0].name]
    result = Result("experts", f"A layer of experts: {size}")
    result.tables.append(peaks_and_times("steps", list(rows.values()), base))
    ratio = ratios(least, base)
    peak = tables.quotient(least.peak_bytes, base.peak_bytes)
    result.targets += [
        Target("memory_budget=0.0: peak / Inductor", peak, PEAK_LIMIT),
        Target("memory_budget=0.0: time / Inductor", ratio and ratio[0], TIME_LIMIT),
    ]
    result.notes.append("Time: median ratio to Inductor over interleaved rounds (least-greatest).")
    result.records["rows"] = records(rows)
    return result


main = Command("experts", (run,), _DESCRIPTION, EXAMPLES)
