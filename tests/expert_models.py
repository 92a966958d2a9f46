"""Layers of experts whose rows are sorted by expert, as transformers and torchtitan write them.

The products run by ``transformers::grouped_mm_fallback``, by ``torch._grouped_mm``, or, where
neither has a kernel, one expert after the other.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

assert moe  # it registers the op

WIDTH, HIDDEN, EXPERTS, BEST = 32, 96, 4, 2


@dataclasses.dataclass(frozen=True)
class Form:
    """How a layer is written.

    Attributes:
        products: "fallback" or "native", the op of the products.
        gate: "fused" (one product for gate and up), "apart" or "none".
        bias: each expert has biases, as in gpt-oss.
        clamp: gate and up are clamped, as there.
        shared: an expert that all tokens pass, as in DeepSeek.
        routing: "spread", "empty" (one expert gets no row) or "one" (the first choice of all
            tokens is one expert).
        joined: "permuted" (rows are put back and added up, as in transformers) or "added"
            (rows are added to the tokens they come from, as in torchtitan).
        early: the routing weights scale the rows before the experts.
    """

    products: str = "fallback"
    gate: str = "fused"
    bias: bool = False
    clamp: bool = False
    shared: bool = False
    routing: str = "spread"
    joined: str = "permuted"
    early: bool = False


def grouped(rows: Tensor, weights: Tensor, ends: Tensor, native: bool) -> Tensor:
    if rows.dtype == torch.float64:
        starts = [0, *ends.tolist()[:-1]]
        spans = zip(starts, ends.tolist(), weights, strict=True)
        return torch.cat([rows[start:end] @ weight for start, end, weight in spans])
    if native:
        return torch._grouped_mm(rows, weights, ends)
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


class Experts(nn.Module):
    def __init__(
        self, form: Form, width: int = WIDTH, hidden: int = HIDDEN, experts: int = EXPERTS
    ):
        super().__init__()
        self.form, self.experts = form, experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)
        if form.gate == "apart":
            self.gate = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        elif form.gate == "fused":
            self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        if form.bias:
            self.up_bias = nn.Parameter(torch.randn(self.up.shape[:2]))
            self.down_bias = nn.Parameter(torch.randn(experts, width))
        if form.shared:
            self.shared_up = nn.Linear(width, 2 * hidden)
            self.shared_down = nn.Linear(2 * hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        form, tokens = self.form, x.flatten(0, -2)
        scores = self._scores(tokens)
        best, choice = scores.topk(BEST, dim=-1)
        expert, order = choice.flatten().sort()
        counts = torch.histc(expert.to(torch.float32), self.experts, min=0, max=self.experts - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows, weights = tokens[order // BEST], best.flatten()[order].unsqueeze(-1)
        if form.early:
            rows = rows * weights
        found = self._expert(rows, expert, ends)
        if not form.early:
            found = found * weights
        if form.joined == "permuted":
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            joined = found[back].view(-1, BEST, x.shape[-1]).sum(1)
        else:
            joined = torch.zeros_like(tokens).index_add(0, order // BEST, found)
        if form.shared:
            joined = joined + self.shared_down(F.silu(self.shared_up(tokens)))
        return joined.view_as(x)

    def _scores(self, tokens: Tensor) -> Tensor:
        """In bfloat16 the choice is made in float32, so that float64 chooses the same experts."""
        wide = torch.float32 if tokens.dtype == torch.bfloat16 else tokens.dtype
        logits = F.linear(tokens.to(wide), self.router.weight.to(wide))
        if self.form.routing == "empty":
            logits = logits - 1e4 * (torch.arange(self.experts, device=logits.device) == 1)
        if self.form.routing == "one":
            logits = logits + 1e4 * (torch.arange(self.experts, device=logits.device) == 2)
        return logits.softmax(-1).to(tokens.dtype)

    def _expert(self, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        form = self.form
        native = form.products == "native"
        up = grouped(rows, self.up.transpose(1, 2), ends, native)
        if form.bias:
            up = up + self.up_bias[expert]
        if form.gate == "apart":
            up = F.silu(grouped(rows, self.gate.transpose(1, 2), ends, native)) * up
        elif form.gate == "fused":
            gate, up = up.chunk(2, -1)
            if form.clamp:
                gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
            up = F.silu(gate) * up
        else:
            up = F.gelu(up)
        down = grouped(up, self.down.transpose(1, 2), ends, native)
        return down + self.down_bias[expert] if form.bias else down
