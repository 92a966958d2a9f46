"""FlexAttention: higher-order ops with subgraphs, in graphs that mst splits.

torch has no kernel for its backward on the CPU. The graphs run op by op, FlexAttention by its
definition in plain ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import mstpass
from mstpass.graph import ops
from mstpass.graph.advice import fix_of
from mstpass.graph.attention import OTHER_KERNEL, ROWS, is_attention, operand_rows
from mstpass.graph.heads import BUFFERS, OTHER_SCORES
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import Refusal
from mstpass.regions.attention import detect_attention
from tests.checks import KERNELS, check_against_float64, joint_graph, kinds, op_by_op
from tests.head_loops import check_loops

BATCH, TOKENS, WIDTH, HEADS = 2, 96, 32, 4


@dataclasses.dataclass(frozen=True)
class Form:
    """How attention is written.

    Attributes:
        mask: "causal", "documents" or none, as a mask of blocks.
        score: "cap" (scores are capped), "slopes" (ALiBi, a slope of each head in a buffer),
            "learned" (a bias with a gradient) or none.
        kv_heads: key-value heads.
    """

    mask: str = "causal"
    score: str = ""
    kv_heads: int = HEADS


class Layer(nn.Module):
    def __init__(self, form: Form):
        super().__init__()
        self.form, self.features = form, WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * form.kv_heads * self.features)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))
        self.bias = nn.Parameter(torch.randn(TOKENS)) if form.score == "learned" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.form.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        attend = self._attend if torch.compiler.is_compiling() else self._attend_in_plain_ops
        found = attend(q, k, v)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self._mask_mod(q.shape[2])
        blocks: flex.BlockMask | None = None
        if mask is not None:
            blocks = flex.create_block_mask(mask, None, None, q.shape[2], q.shape[2], device="cpu")
        grouped = self.form.kv_heads != HEADS
        found = flex.flex_attention(q, k, v, self._score_mod(), blocks, enable_gqa=grouped)
        assert isinstance(found, Tensor)
        return found

    def _attend_in_plain_ops(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By the definition; FlexAttention that is not compiled compiles itself."""
        k, v = (t.repeat_interleave(HEADS // self.form.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.features**0.5
        head = torch.arange(HEADS)[:, None, None]
        row, column = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
        change, mask = self._score_mod(), self._mask_mod(q.shape[2])
        if change is not None:
            scores = change(scores, None, head, row, column)
        if mask is not None:
            scores = scores.masked_fill(~mask(None, head, row, column), -torch.inf)
        return scores.softmax(-1) @ v

    def _mask_mod(self, tokens: int) -> Callable[..., Tensor] | None:
        documents = torch.arange(tokens) // 50

        def causal(b: Any, h: Any, row: Tensor, column: Tensor) -> Tensor:
            return row >= column

        def same(b: Any, h: Any, row: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & (documents[row] == documents[column])

        return {"causal": causal, "documents": same}.get(self.form.mask)

    def _score_mod(self) -> Callable[..., Tensor] | None:
        slopes, bias = self.slopes, self.bias

        def cap(score: Tensor, b: Any, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return 5.0 * torch.tanh(score / 5.0)

        def alibi(score: Tensor, b: Any, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + slopes[h] * (column - row)

        def learned(score: Tensor, b: Any, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + bias[column]

        return {"cap": cap, "slopes": alibi, "learned": learned}.get(self.form.score)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No device is refused, and no test, even with ``--all``, compiles kernels."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.delenv(KERNELS, raising=False)
    with op_by_op():
        yield


FORMS = (
    pytest.param(Form(), id="causal"),
    pytest.param(Form("", "learned"), id="learned"),
    pytest.param(Form("documents"), id="documents", marks=pytest.mark.full),
    pytest.param(Form("", "cap"), id="capped", marks=pytest.mark.full),
    pytest.param(Form("causal", "slopes"), id="slopes", marks=pytest.mark.full),
    pytest.param(Form(kv_heads=2), id="grouped queries", marks=pytest.mark.full),
    pytest.param(Form(kv_heads=1), id="one head of keys"),
)


def _loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("budget", [0.0, pytest.param(0.6, marks=pytest.mark.full)])
def test_gradients(form: Form, budget: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    model = nn.Sequential(Layer(form), Layer(form))
    report = check_against_float64(model, _loss_of, [x], memory_budget=budget)
    assert report.outcome.save_plan is not None
    assert report.outcome.save_plan.solver != "torch", report.outcome.notes


@pytest.mark.full
def test_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(Form(kv_heads=2)), Layer(Form(kv_heads=2)))
    loss = _loss_of(model)
    options = {"memory_budget": 0.0, "strict": True}
    step = torch.compile(loss, backend="mst", dynamic=True, options=options)
    for batch, tokens in ((2, 96), (3, 70), (2, 128)):
        x = torch.randn(batch, tokens, WIDTH, requires_grad=True)
        leaves = [x, *model.parameters()]
        found, expected = (torch.autograd.grad(fn(x), leaves) for fn in (step, loss))
        torch.testing.assert_close(found, expected)
    assert ("attention", "recompute") in kinds(mstpass.reports()[-1])


def _joint(form: Form) -> JointGraph:
    torch.manual_seed(0)
    model = Layer(form)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    return JointGraph(*joint_graph(_loss_of(model), x))


@pytest.mark.parametrize(
    ("form", "num_heads"),
    [
        pytest.param(Form("documents"), HEADS, id="documents"),
        pytest.param(Form("", "cap", kv_heads=2), 2, id="grouped queries"),
        pytest.param(Form(), HEADS, id="causal", marks=pytest.mark.full),
    ],
)
def test_heads_run_in_loops(form: Form, num_heads: int) -> None:
    joint = _joint(form)
    (region,), rejections = detect_attention(joint)
    assert not rejections and region.num_tokens == num_heads
    plan = check_loops(joint, region, tolerance=1e-4)  # in float32
    for loop in plan.loops:  # the weights alone are sliced
        sliced = [joint.by_name[item.node] for item in loop.inputs if item.spec]
        assert all(ops.is_weight(node) for node in sliced), sliced


def test_scores_of_each_head_are_refused() -> None:
    regions, rejections = detect_attention(_joint(Form("causal", "slopes")))
    assert not regions and [r.reason for r in rejections] == [OTHER_SCORES]
    assert all(fix_of(reason) for reason in (OTHER_SCORES, BUFFERS))


def test_it_has_no_rows_of_queries() -> None:
    (node, *_) = filter(is_attention, _joint(Form("causal", "")).nodes)
    assert operand_rows(node, (ROWS,)) == Refusal(OTHER_KERNEL)


@pytest.mark.full
def test_the_backward_stays_outside_where_buffers_have_gradients() -> None:
    joint = _joint(Form("", "learned"))
    (region,), rejections = detect_attention(joint)
    assert not rejections
    target = torch.ops.higher_order.flex_attention_backward
    (backward,) = joint.module.graph.find_nodes(op="call_function", target=target)
    assert backward.name not in dict(region.members)
    check_loops(joint, region, tolerance=1e-4)
