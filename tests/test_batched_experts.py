"""Experts as batched products: one matrix of rows for each expert, all with as many rows.

As in Llama 4 (all tokens for every expert), with a capacity for each expert, and in einsums.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.measure import peak_bytes
from tests.checks import check_against_float64, check_batches, compiled, kinds

pytestmark = [pytest.mark.sampled(5), pytest.mark.op_by_op]

EXPERTS, WIDTH, HIDDEN = 4, 32, 96
Rows = Callable[["Experts", Tensor, Tensor], Tensor]  # experts, x (N, d), scores (N, E) -> (N, d)


class Experts(nn.Module):
    """SwiGLU experts with biases; ``rows`` says which rows they get and how these come back."""

    def __init__(self, rows: Rows, bias: bool = False, transposed: bool = False):
        super().__init__()
        self.rows, self.transposed = rows, transposed
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = (EXPERTS, WIDTH, 2 * HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        if transposed:
            up, down = ((shape[0], shape[2], shape[1]) for shape in (up, down))
        self.up = nn.Parameter(torch.randn(up) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(down) / HIDDEN**0.5)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 1, 2 * HIDDEN)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, 1, WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        wide = torch.float32 if tokens.dtype == torch.bfloat16 else tokens.dtype
        scores = F.linear(tokens.to(wide), self.router.weight.to(wide)).softmax(-1)
        return self.rows(self, tokens, scores.to(tokens.dtype)).view_as(x)

    def experts(self, rows: Tensor) -> Tensor:
        """Shapes: rows (E, C, d), result (E, C, d)."""
        gate, up = _product(self.up_bias, rows, self._weight(self.up)).chunk(2, -1)
        return _product(self.down_bias, F.silu(gate) * up, self._weight(self.down))

    def _weight(self, weight: nn.Parameter) -> Tensor:
        return weight.transpose(1, 2) if self.transposed else weight


def _product(bias: Tensor | None, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias, rows, weight)


def all_tokens(experts: Experts, x: Tensor, scores: Tensor) -> Tensor:
    """Every expert gets all tokens, scaled by its score, as in Llama 4."""
    rows = x.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)
    return x + experts.experts(rows.view(EXPERTS, -1, WIDTH)).sum(0)


def experts_choose(experts: Experts, x: Tensor, scores: Tensor) -> Tensor:
    """Every expert takes the tokens with the highest scores, as many as its capacity."""
    weights, chosen = scores.t().topk(len(x) // 3, dim=-1)
    found = experts.experts(x[chosen]) * weights[..., None]
    return x.index_add(0, chosen.flatten(), found.flatten(0, 1))


def einsum(experts: Experts, x: Tensor, scores: Tensor) -> Tensor:
    gate, up = torch.einsum("nd,edh->neh", x, experts.up).chunk(2, -1)
    return torch.einsum("neh,ehd,ne->nd", F.silu(gate) * up, experts.down, scores)


def _loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def _input(tokens: int = 1500) -> Tensor:
    return torch.randn(2, tokens // 2, WIDTH, requires_grad=True)


FORMS = {
    "all tokens": (all_tokens,),
    "with biases": (all_tokens, True),
    "transposed weights": (all_tokens, False, True),
    "capacity": (experts_choose,),
    "capacity with biases": (experts_choose, True, True),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("options", [{"memory_budget": 0.0}, {"chunk_tokens": 128}], ids=str)
def test_gradients(form: tuple[Rows, bool, bool], options: dict[str, object]) -> None:
    torch.manual_seed(0)
    report = check_against_float64(Experts(*form), _loss, [_input()], **options)
    assert "mlp" in [kind for kind, _ in kinds(report)], report.rejections


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bfloat16(form: tuple[Rows, bool, bool]) -> None:
    torch.manual_seed(0)
    model, x = Experts(*form).bfloat16(), _input().detach().bfloat16().requires_grad_()
    assert kinds(check_against_float64(model, _loss, [x], memory_budget=0.0))


def test_einsum() -> None:
    torch.manual_seed(0)
    report = check_against_float64(Experts(einsum), _loss, [_input()], chunk_tokens=128)
    assert kinds(report), report.rejections


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("rows", [all_tokens, experts_choose])
def test_any_number_of_tokens(rows: Rows, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    batches = ([_input(tokens)] for tokens in (600, 202, 66, 14, 6))
    options = {"chunk_tokens": 64, "memory_budget": 0.0}
    assert check_batches(Experts(rows), _loss, batches, dynamic=dynamic, **options)


@pytest.mark.parametrize("rows", [all_tokens, experts_choose])
def test_needs_less_memory(rows: Rows) -> None:
    report = mstpass.explain(_loss(Experts(rows)), _input(8192), options={"memory_budget": 0.0})
    assert report.peak_bytes is not None and report.baseline_peak_bytes is not None
    assert report.peak_bytes < 0.6 * report.baseline_peak_bytes


@pytest.mark.kernels
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str
)
def test_whole_experts_need_what_is_simulated(dtype: torch.dtype) -> None:
    """The backward computes the parts of a concatenation in their places."""
    model = Experts(experts_choose).to(dtype)
    step = _loss(model)
    x, options = _input().detach().to(dtype).requires_grad_(), {"chunk": "off"}
    expected = mstpass.explain(step, x, options=options).peak_bytes
    ours = compiled(step, **options)

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(ours(x), [x, *model.parameters()]))

    run()
    assert expected is not None
    assert peak_bytes(run) == pytest.approx(expected, rel=0.03)
