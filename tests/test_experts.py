"""Products of experts run in chunks of the rows that are sorted by expert."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass.graph.buffer_ops import is_written_in_place
from mstpass.graph.grouped_products import add_grouped_, grouped_rows, grouped_sums
from tests.checks import check_against_float64, check_batches, errors, gradients, in_float64, kinds
from tests.expert_models import WIDTH, Experts, Form, grouped

pytestmark = [pytest.mark.sampled(5), pytest.mark.op_by_op]

TOKENS = (2, 300)
FORMS = {
    "mixtral": Form(),
    "gpt-oss": Form(bias=True, clamp=True),
    "deepseek": Form(shared=True),
    "plain": Form(gate="none"),
    "empty expert": Form(routing="empty"),
    "one expert": Form(routing="one"),
    "added": Form(joined="added", gate="apart", early=True),
}


def _input() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*TOKENS, WIDTH, requires_grad=True)


def _loss(model: nn.Module):  # type: ignore[no-untyped-def]
    return lambda x: model(x).square().mean()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("options", [{"memory_budget": 0.0}, {"chunk_tokens": 128}], ids=str)
def test_gradients(form: Form, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    report = check_against_float64(Experts(form), _loss, [_input()], **options)
    assert "mlp" in [kind for kind, _ in kinds(report)], report.rejections
    assert not report.rejections


NATIVE = Form(products="native", joined="added", gate="apart")


@pytest.mark.parametrize("form", [NATIVE, Form(bias=True)], ids=["native", "biased"])
@pytest.mark.parametrize("options", [{"memory_budget": 0.0}, {"chunk_tokens": 128}], ids=str)
def test_bfloat16(form: Form, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, x = Experts(form).bfloat16(), _input().detach().bfloat16().requires_grad_()
    report = check_against_float64(model, _loss, [x], **options)
    assert kinds(report) and not report.rejections


@pytest.mark.parametrize("dynamic", [None, True])
def test_any_number_of_tokens(dynamic: bool | None) -> None:
    """A batch without tokens for an expert, one shorter than a chunk, and lengths around it."""
    torch.manual_seed(0)
    lengths = (300, 97, 7, 32, 33, 1)
    batches = ([torch.randn(2, tokens, WIDTH, requires_grad=True)] for tokens in lengths)
    options = {"chunk_tokens": 64, "memory_budget": 0.0}
    assert check_batches(Experts(Form()), _loss, batches, dynamic=dynamic, **options)


class LocalExperts(nn.Module):
    """What a rank of an expert-parallel group runs between its exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(4, WIDTH, 64) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(4, 64, WIDTH) / 8)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        inner = F.silu(grouped(rows, self.gate, ends, native=True))
        inner = inner * grouped(rows, self.up, ends, native=True)
        return grouped(inner, self.down, ends, native=True)


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_local_part_of_expert_parallelism(dynamic: bool | None) -> None:
    """As many rows as the exchange brings, another number in each step."""
    torch.manual_seed(0)
    model = LocalExperts().bfloat16()
    options = {"strict": True, "chunk_tokens": 128, "memory_budget": 0.0}
    compiled = torch.compile(model, backend="mst", fullgraph=True, dynamic=dynamic, options=options)

    def of_rows(experts: nn.Module, counts: list[int]):  # type: ignore[no-untyped-def]
        return lambda rows: experts(rows, torch.tensor(counts)).square().mean()

    for counts in ([300, 0, 100, 624], [97, 200, 3, 33], [0, 0, 800, 0]):
        x = torch.randn(sum(counts), WIDTH).bfloat16().requires_grad_()
        wide_model, wide_inputs = in_float64(model, [x])
        exact = gradients(wide_model, of_rows(wide_model, counts), wide_inputs)
        eager = errors(gradients(model, of_rows(model, counts), [x]), exact)
        ours = errors(gradients(model, of_rows(compiled, counts), [x]), exact)
        assert all(mine <= 1.5 * theirs for mine, theirs in zip(ours, eager, strict=True)), counts
        report = mstpass.reports()[-1]
        assert [kind for kind, _ in kinds(report)] == ["mlp"], report.rejections


def test_two_layers_under_a_checkpoint() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(Form()), Experts(Form(shared=True, bias=True, clamp=True)))
    report = check_against_float64(
        model,
        lambda model: lambda x: checkpoint(model, x, use_reentrant=False).square().mean(),
        [_input()],
        memory_budget=0.0,
    )
    assert kinds(report)


def test_layers_share_no_region() -> None:
    """The zeros of a clamp's gradient are one constant for both layers."""
    torch.manual_seed(0)
    form = Form(bias=True, clamp=True)
    model = nn.Sequential(Experts(form), Experts(form))
    report = check_against_float64(model, _loss, [_input()], chunk_tokens=128)
    assert kinds(report) == [("mlp", "save")] * 2 and not report.rejections


def test_no_gradient_of_a_weight_exists_twice() -> None:
    """The products read the weights transposed, and the gradients have the weights' layout."""
    layer = Experts(Form(), width=64, hidden=512, experts=8)
    options = {"memory_budget": 0.0}
    report = mstpass.explain(_loss(layer), torch.randn(64, 64, requires_grad=True), options=options)
    gradients_bytes = sum(4 * weight.numel() for weight in (layer.up, layer.down))
    assert report.peak_bytes is not None
    assert gradients_bytes < report.peak_bytes < 1.5 * gradients_bytes


def test_rows_outside_of_all_experts_are_zero() -> None:
    """``ends`` may stop before the last row, as with experts of other ranks."""
    rows, weights = torch.randn(10, 4), torch.randn(3, 4, 5)
    positions, ends = torch.arange(10), torch.tensor([2, 2, 7], dtype=torch.int32)
    whole = grouped_rows(rows, weights, positions, ends)
    chunks = [grouped_rows(rows[i : i + 3], weights, positions[i : i + 3], ends) for i in (0, 3, 6)]
    torch.testing.assert_close(whole[:9], torch.cat(chunks))
    assert whole[7:].eq(0).all() and not whole[:7].eq(0).any()
    other = torch.randn(10, 5)
    total = torch.full((3, 4, 5), torch.nan)
    for number, i in enumerate((0, 3, 6, 9)):
        part = slice(i, i + 3)
        add_grouped_(total, rows.t()[:, part], other[part], positions[part], ends, number)
    sums = grouped_sums(rows.t(), other, positions, ends, torch.float32)
    torch.testing.assert_close(total, sums)
    torch.testing.assert_close(sums[2], rows[2:7].t() @ other[2:7])
    assert sums[1].eq(0).all()


@pytest.mark.parametrize(("shape", "in_place"), [((3, 4, 5), True), ((12, 5), False)])
def test_sums_in_another_shape_get_a_buffer_of_their_own(
    shape: tuple[int, ...], in_place: bool
) -> None:
    """``add_grouped_`` tells the experts by the first dim of the loop's buffer."""
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("left", "right", "positions", "ends")]
    sums = graph.call_function(grouped_sums, (*operands, torch.float32))
    result = graph.call_function(torch.ops.aten.view.default, (sums, list(shape)))
    graph.output((result,))
    sums.meta["val"], result.meta["val"] = torch.empty(3, 4, 5), torch.empty(shape)
    assert is_written_in_place(result) == in_place
