"""Loops over rows of the batch: through attention, norms, products and the losses of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstpass.graph.attention import is_attention
from mstpass.graph.axes import BATCH
from mstpass.graph.joint import JointGraph
from mstpass.graph.ops import base_of, is_constant
from mstpass.plans import Region
from mstpass.regions.batch import detect_batch
from tests.checks import joint_graph
from tests.head_loops import check_loops, skip_without_float64_attention

BATCH_ROWS, TOKENS, WIDTH, HEADS = 4, 32, 16, 2

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _float64_attention() -> None:
    skip_without_float64_attention()


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        done = F.scaled_dot_product_attention(*qkv, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(done.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def _traced(mask: Tensor | None, batch: int = BATCH_ROWS) -> JointGraph:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(2)).double()
    head = nn.Linear(WIDTH, 24).double()
    x = torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, mask)
        return head(x).logsumexp(-1).square().sum()

    return JointGraph(*joint_graph(step, x))


def _region(joint: JointGraph) -> Region:
    (region,), rejections = detect_batch(joint)
    assert not rejections
    return region


@pytest.mark.parametrize("rows_of_mask", [0, 1, BATCH_ROWS])
def test_a_step_runs_in_loops_over_rows_of_the_batch(rows_of_mask: int) -> None:
    """One region holds both layers; a mask may be one for all rows, or one for each."""
    mask = None
    if rows_of_mask:
        mask = torch.randn(rows_of_mask, 1, TOKENS, TOKENS, dtype=torch.float64)
    joint = _traced(mask)
    region = _region(joint)
    assert (region.axis, region.num_tokens) == (BATCH, BATCH_ROWS)
    members = {name for name, _ in region.members}
    assert {n.name for n in joint.nodes if is_attention(n)} <= members
    check_loops(joint, region)


def test_what_a_loop_reads_and_returns() -> None:
    joint = _traced(None)
    plan = check_loops(joint, _region(joint))
    forward, backward = plan.loops
    summed = {item.node for item in (*forward.outputs, *backward.outputs) if item.spec is None}
    gradients = {base_of(node).name for node in joint.backward_outputs}
    (tokens,) = gradients - summed  # all others are those of weights
    assert joint.by_name[tokens].meta["val"].shape == (BATCH_ROWS, TOKENS, WIDTH)
    whole = {base_of(joint.by_name[item.node]) for item in forward.inputs if not item.spec}
    assert all(n.op == "placeholder" or is_constant(n) for n in whole)  # the weights


def test_a_norm_over_the_batch_ends_the_region() -> None:
    """Its statistics are of all rows."""
    torch.manual_seed(0)
    layer, norm = Block().double(), nn.BatchNorm1d(WIDTH, track_running_stats=False).double()
    x = torch.randn(BATCH_ROWS, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return norm(layer(x, None).sin().transpose(1, 2)).sin().square().sum()

    joint = JointGraph(*joint_graph(step, x))
    region = _region(joint)
    (loss,) = joint.forward_outputs
    assert loss.name not in {name for name, _ in region.members}
    check_loops(joint, region)


def test_one_row_has_no_loop() -> None:
    assert detect_batch(_traced(None, batch=1)) == ([], [])
