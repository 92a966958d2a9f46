"""Which regions are found, and which are refused; every positive case has a negative one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mstpass import pipeline
from mstpass.options import Options
from mstpass.plans import Outcome
from tests.checks import joint_graph
from tests.models import MLPS, Block, TinyLM, next_token_loss

pytestmark = pytest.mark.sampled(4)

N, D, VOCAB = 192, 32, 600


def outcome(fn: Callable[..., object], *inputs: object, **options: object) -> Outcome:
    graph, outputs = joint_graph(fn, *inputs)
    given = Options.parse({"chunk_tokens": 64, **options}, environ={})
    return pipeline.run(graph, given, num_fwd_outputs=outputs).outcome


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, N // 2, D)), requires_grad=True)


def _through(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.logsumexp(model(x).sin().sum(-1).flatten(), 0)


@pytest.mark.parametrize("name", MLPS)
def test_each_mlp_is_one_region(name: str) -> None:
    model = nn.Sequential(*(Block(D, MLPS[name](D)) for _ in range(2)))
    found = outcome(_through(model), _x())
    assert [r.kind for r in found.regions] == ["mlp", "mlp"], found.rejections
    assert not found.rejections


class WithBatchStatistics(nn.Module):
    """An MLP whose wide value is normalized over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(F.relu(h - h.mean(dim=(0, 1), keepdim=True)))


class WithCumsum(WithBatchStatistics):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).cumsum(dim=1))


class WithSoftmaxOverTokens(WithBatchStatistics):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(dim=1))


class WithConvolutionOverTokens(WithBatchStatistics):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4 * D, 4 * D, 3, padding=1, groups=4 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)))


class WithShuffledTokens(WithBatchStatistics):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x).flip(1)))


class WithTokensShiftedByPadding(WithBatchStatistics):
    """One token more in front and one less at the end: the shape stays the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(F.pad(self.up(x), (0, 0, 1, -1))))


@pytest.mark.parametrize(
    "mlp",
    [
        WithCumsum,
        WithSoftmaxOverTokens,
        WithConvolutionOverTokens,
        WithShuffledTokens,
        WithTokensShiftedByPadding,
    ],
)
def test_mlps_that_mix_tokens_are_refused(mlp: type[nn.Module]) -> None:
    found = outcome(_through(Block(D, mlp())), _x())
    assert not found.regions
    assert found.rejections and found.rejections[0].reason and found.rejections[0].node


def test_an_mlp_with_statistics_of_the_batch_is_computed_in_rounds() -> None:
    (region,) = outcome(_through(Block(D, WithBatchStatistics())), _x()).regions
    assert region.kind == "mlp" and "computed more than once" in region.note


def test_an_mlp_whose_wide_value_is_returned_keeps_only_that() -> None:
    block = Block(D, MLPS["gelu"](D))

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = F.gelu(block.mlp.up(block.norm(x)))
        return block.out(x + block.mlp.down(wide)).sin().sum(), wide

    found = outcome(fn, _x())
    (region,) = found.regions
    assert region.mode == "save" and "output of the graph" in region.note


def test_heads_are_found_and_those_that_mix_tokens_in_rounds() -> None:
    model = TinyLM(VOCAB, D)
    ids = torch.randint(0, VOCAB, (2, N // 2))
    found = outcome(lambda i: next_token_loss(model, i), ids)
    assert [(r.kind, r.mode) for r in found.regions] == [("lm_head", "fused")]

    def over_the_sequence(i: torch.Tensor) -> torch.Tensor:
        return model.logits(i).softmax(dim=1).square().sum()

    found = outcome(over_the_sequence, ids)
    assert not found.regions and found.rejections

    def batch_normalized(i: torch.Tensor) -> torch.Tensor:
        logits = model.logits(i).flatten(0, 1)
        return F.cross_entropy((logits - logits.mean(0)) / logits.std(0), i.flatten())

    (region,) = outcome(batch_normalized, ids).regions
    assert "computed more than once" in region.note

    def shifted(i: torch.Tensor) -> torch.Tensor:
        logits = model.logits(i)
        return F.cross_entropy((logits + logits.roll(1, 1)).flatten(0, 1), i.flatten())

    found = outcome(shifted, ids)
    assert not found.regions and found.rejections


def test_two_scalar_gradients_are_not_fused() -> None:
    """The caller may weight two losses freely, so no single scalar can be factored out."""
    model = TinyLM(VOCAB, D)
    ids = torch.randint(0, VOCAB, (2, N // 2))

    def two(i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.logits(i).flatten(0, 1)
        return F.cross_entropy(logits, i.flatten()), logits.logsumexp(-1).square().mean()

    found = outcome(two, ids)
    assert [(r.kind, r.mode) for r in found.regions] == [("lm_head", "recompute")]
    assert "several gradients" in found.regions[0].note


def test_a_projection_for_attention_is_not_worth_it() -> None:
    qkv, out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return out(y.transpose(1, 2).flatten(2)).sin().sum()

    found = outcome(attention, _x())
    assert not found.regions and "save no memory" in found.rejections[0].reason


def test_short_inputs_are_left_whole_unless_forced() -> None:
    model = TinyLM(VOCAB, D)
    ids = torch.randint(0, VOCAB, (2, N // 2))
    found = outcome(lambda i: next_token_loss(model, i), ids, chunk_tokens=None)
    assert not found.regions and "fewer than two chunks" in found.rejections[0].reason


def test_rejections_name_the_source() -> None:
    model = TinyLM(VOCAB, D)
    ids = torch.randint(0, VOCAB, (2, N // 2))
    found = outcome(lambda i: (model.logits(i).sum(), model.logits(i)), ids)
    assert found.rejections[0].source == "model.head" or "head" in found.rejections[0].source


def test_stages_can_be_stopped_after() -> None:
    model = TinyLM(VOCAB, D)
    ids = torch.randint(0, VOCAB, (2, N // 2))
    graph, outputs = joint_graph(lambda i: next_token_loss(model, i), ids)
    options = Options.parse({"chunk_tokens": 64}, environ={})
    planned = pipeline.run(graph, options, num_fwd_outputs=outputs, stop_after="plan")
    assert planned.outcome.regions and planned.joint is None
    with pytest.raises(ValueError, match="stop_after"):
        pipeline.run(graph, options, num_fwd_outputs=outputs, stop_after="nowhere")
