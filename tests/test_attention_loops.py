"""Attention in loops over groups of heads: what is taken, what is refused, and the gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mstpass.graph import ops
from mstpass.graph.attention import is_attention
from mstpass.graph.heads import HeadDim, through_view
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import Refusal
from mstpass.normalize.for_heads import bias_after_product, products_by_section
from mstpass.plans import LoopPlan
from mstpass.regions.attention import detect_attention
from tests.attention_models import HEADS, WIDTH, Form, Layer
from tests.checks import joint_graph
from tests.head_loops import check_loops, skip_without_float64_attention

FULL = pytest.mark.full
TOKENS = (2, 16)


# ---- helpers -------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _float64_attention() -> None:
    """These tests run in float64."""
    skip_without_float64_attention()


def traced(form: Form, cross: bool = False) -> JointGraph:
    """The joint graph of a layer in float64, prepared as the pipeline prepares it."""
    torch.manual_seed(0)
    model = Layer(form).double()
    inputs = [torch.randn(*TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)]
    if cross:
        inputs.append(torch.randn(2, 24, WIDTH, dtype=torch.float64, requires_grad=True))

    def step(*args: Tensor) -> Tensor:
        return model(*args).square().mean()

    joint, _ = products_by_section(JointGraph(*joint_graph(step, *inputs)))
    return bias_after_product(joint)[0]


def test_sections_of_each_layer_are_divided_with_their_own_gradients() -> None:
    """The gradient of each weight is put together where the undivided one was computed."""
    layers = nn.Sequential(*(Layer(Form(fused="sections")) for _ in range(2))).double()
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    joint = JointGraph(*joint_graph(lambda x: layers(x).square().mean(), x))
    divided, _ = products_by_section(joint)
    assert not any("split" in str(node.target) for node in divided.nodes)
    last, first = [node for node in divided.nodes if node.target is torch.ops.aten.cat.default]
    between = divided.nodes[divided.index[last] : divided.index[first]]
    assert any(ops.is_matmul(node) and node.name in joint.by_name for node in between)


def _sources(joint: JointGraph, loop: LoopPlan) -> set[str]:
    """The ops of what a loop reads in slices; "placeholder" for inputs of the step."""
    nodes = (joint.by_name[item.node] for item in loop.inputs if item.spec)
    return {str(n.target).split(".")[1] if n.op == "call_function" else n.op for n in nodes}


def _kinds(joint: JointGraph, loop: LoopPlan) -> tuple[int, int]:
    """How many outputs a loop stacks, and how many it sums."""
    stacked = sum(item.spec is not None for item in loop.outputs)
    return stacked, len(loop.outputs) - stacked


# ---- what is taken -------------------------------------------------------------------------------
LLAMA = Form(kv_heads=2, rope="halves", mask="causal")


@pytest.mark.parametrize(
    ("form", "num_heads"),
    [
        pytest.param(LLAMA, 2, id="grouped queries"),
        pytest.param(
            Form(kernel="matmul", kv_heads=2, bias=True, norm="head", mask="causal"),
            2,
            id="written out",
        ),
        pytest.param(Form(rope="pairs", mask="window", bias=True), 4, id="window", marks=FULL),
        pytest.param(Form(rope="complex", mask="causal"), 4, id="complex numbers"),
        pytest.param(Form(lora=4, rope="halves"), 4, id="low rank", marks=FULL),
        pytest.param(Form(kernel="matmul", mask="sink", cap=5.0), 4, id="sinks", marks=FULL),
        pytest.param(Form(kernel="matmul", mask="heads"), 4, id="bias by head", marks=FULL),
        pytest.param(Form(mask="heads"), 4, id="mask by head", marks=FULL),
        pytest.param(Form(fused="heads", norm="head"), 4, id="fused by head", marks=FULL),
        pytest.param(
            Form(fused="sections", bias=True, rope="halves", mask="causal"), 4, id="in sections"
        ),
        pytest.param(
            dataclasses.replace(LLAMA, shared_kv=True), 2, id="shared keys and values", marks=FULL
        ),
    ],
)
def test_projections_and_attention_are_one_loop(form: Form, num_heads: int) -> None:
    """Only weights are sliced, and only their gradients stacked."""
    joint = traced(form)
    (region,), rejections = detect_attention(joint)
    assert not rejections and region.num_tokens == num_heads
    plan = check_loops(joint, region)
    forward, backward = plan.loops
    weights = {"placeholder", "slice"} if form.fused == "sections" else {"placeholder"}
    assert _sources(joint, forward) <= weights
    assert _kinds(joint, forward) == (0, 1 + (form.lora > 0))
    assert _sources(joint, backward) <= weights
    # The gradient of the input; besides it, those of what all heads share.
    shared = 2 * (form.norm == "head") + (3 if form.lora else 0)
    assert _kinds(joint, backward)[1] == 1 + shared


@pytest.mark.parametrize("shared_kv", [True, pytest.param(False, marks=FULL)])
def test_one_head_of_keys_is_shared_by_all_groups(shared_kv: bool) -> None:
    """Attention itself reads it, or a copy for each head of the queries."""
    joint = traced(dataclasses.replace(LLAMA, kv_heads=1, shared_kv=shared_kv))
    (region,), _ = detect_attention(joint)
    assert region.num_tokens == HEADS
    plan = check_loops(joint, region)
    assert _kinds(joint, plan.loops[1])[1] == 3  # gradients of the input, of keys and of values


@pytest.mark.full
def test_cross_attention_sums_two_gradients() -> None:
    joint = traced(Form(), cross=True)
    (region,), _ = detect_attention(joint)
    plan = check_loops(joint, region)
    assert _kinds(joint, plan.loops[1])[1] == 2


@pytest.mark.full
def test_two_attentions_that_share_their_keys() -> None:
    """Each has its own loops; the second one reads the keys and values of the first in slices."""
    torch.manual_seed(0)
    first, second = (Layer(Form(mask="causal")).double() for _ in range(2))
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*TOKENS, HEADS, -1).transpose(1, 2) for p in projections(first))
        y = x + merged(first, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        q = second.attention.q(y).view(*TOKENS, HEADS, -1).transpose(1, 2)
        return merged(second, F.scaled_dot_product_attention(q, k, v)).square().mean()

    joint = JointGraph(*joint_graph(step, x))
    regions, rejections = detect_attention(joint)
    assert len(regions) == 2 and not rejections
    for region in regions:
        check_loops(joint, region)


def projections(layer: Layer) -> tuple[nn.Module, nn.Module, nn.Module]:
    return layer.attention.q, layer.attention.k, layer.attention.v


def merged(layer: Layer, heads: Tensor) -> Tensor:
    return layer.attention.out(heads.transpose(1, 2).flatten(2))


def test_a_norm_over_all_heads_stays_outside() -> None:
    """The region begins after it: the queries and keys are read in slices."""
    joint = traced(Form(norm="all", mask="causal"))
    (region,), rejections = detect_attention(joint)
    assert not rejections
    plan = check_loops(joint, region)
    assert _sources(joint, plan.loops[0]) > {"placeholder"}
    members = dict(region.members)
    means = [n for n in joint.nodes if "mean" in str(n.target)]
    assert means and not any(n.name in members for n in means)


class BiasedScores(nn.Module):
    """Layers of attention that add one learned bias of positions to their scores, as T5's do."""

    def __init__(self, layers: int):
        super().__init__()
        form = Form(kernel="matmul")
        self.layers = nn.ModuleList(Layer(form) for _ in range(layers))
        self.bias = nn.Embedding(8, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        far = (positions[None] - positions[:, None]).abs().clamp(max=7)
        bias = self.bias(far).permute(2, 0, 1)
        for layer in self.layers:
            q, k, v = (
                p(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for p in projections(layer)
            )
            weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
            x = x + merged(layer, weights @ v)
        return x


def test_layers_that_share_a_bias_are_a_loop_each() -> None:
    """The bias and the sum of its gradients over layers lead from one layer to the next."""
    torch.manual_seed(0)
    model = BiasedScores(3).double()
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    joint = JointGraph(*joint_graph(lambda x: model(x).square().mean(), x))
    regions, rejections = detect_attention(joint)
    assert len(regions) == 3 and not rejections
    for region in regions:
        products = [name for name, _ in region.members if "mm" in name]
        assert len(products) == 6 + 12, products  # of one layer: forward, and backward
        plan = check_loops(joint, region)
        assert _kinds(joint, plan.loops[0]) == (0, 1)


def test_scores_that_are_added_to_a_bias_by_their_product() -> None:
    """``baddbmm``, with a slope of positions for each head, as in BLOOM."""
    torch.manual_seed(0)
    layer = Layer(Form()).double()
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    batch, length = TOKENS
    slopes = torch.rand(HEADS, 1, 1, dtype=torch.float64) * torch.arange(length)

    def step(x: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(*TOKENS, HEADS, -1).transpose(1, 2).reshape(batch * HEADS, length, -1)
            for p in projections(layer)
        )
        scores = torch.baddbmm(slopes.repeat(batch, 1, 1), q, k.transpose(1, 2), alpha=0.25)
        heads = (scores.softmax(-1) @ v).view(batch, HEADS, length, -1)
        return merged(layer, heads).square().mean()

    joint = JointGraph(*joint_graph(step, x))
    (region,), rejections = detect_attention(joint)
    assert not rejections and region.num_tokens == HEADS
    check_loops(joint, region)


# ---- what is refused -----------------------------------------------------------------------------
def test_dropout_in_attention_is_refused_by_name() -> None:
    joint = traced(LLAMA)
    for node in joint.nodes:
        if is_attention(node):
            node.update_arg(joint_argument(node, "dropout_p"), 0.1)
    regions, (rejection,) = detect_attention(joint)
    assert not regions and "dropout in attention" in rejection.reason


def joint_argument(node: fx.Node, name: str) -> int:
    """The position of an argument."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return [argument.name for argument in arguments].index(name)


@pytest.mark.full
def test_the_mask_of_dropout_is_drawn_for_all_heads_at_once() -> None:
    joint = traced(Form(kernel="matmul", dropout=0.1))
    (region,), _ = detect_attention(joint)
    members = dict(region.members)
    drawn = [n.name for n in joint.nodes if "random" in str(n.target)]
    assert drawn and not members.keys() & set(drawn)
    check_loops(joint, region)


def test_members_of_other_regions_are_left_to_them() -> None:
    joint = traced(LLAMA)
    (whole,), _ = detect_attention(joint)
    (product,) = (
        n
        for n, spec in whole.members
        if spec is None and n in whole.outputs and n not in whole.backward
    )
    (region,), _ = detect_attention(joint, {joint.by_name[product]})
    assert product not in dict(region.members)
    check_loops(joint, region)


# ---- views ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ins", "outs", "held", "result"),
    [
        ([6, 32], [6, 4, 8], (1, 8), (1, 1)),
        ([6, 4, 8], [6, 32], (1, 1), (1, 8)),
        ([2, 4, 3, 6, 8], [2, 12, 6, 8], (1, 1), (1, 3)),
        ([2, 12, 6, 8], [2, 4, 3, 6, 8], (1, 3), (1, 1)),
        ([2, 4, 6, 8], [8, 6, 8], (1, 1), (0, 1)),  # [B * heads, ...]
        ([8, 6, 8], [2, 4, 6, 8], (0, 1), (1, 1)),
        ([6, 96], [6, 3, 4, 8], (1, 8), (2, 1)),  # three rounds of heads
        ([6, 96], [6, 4, 24], (1, 24), (1, 1)),  # head by head
        ([6, 32], [6, 8, 4], (1, 8), (1, 2)),
        ([2, 12, 6], [2, 6, 2, 6], (1, 3), None),  # heads in parts of a dim
        ([6, 32], [192], (1, 8), (0, 8)),
    ],
)
def test_views(
    ins: list[int], outs: list[int], held: tuple[int, int], result: tuple[int, int] | None
) -> None:
    found = through_view(ins, outs, HeadDim(*held), num_heads=4)
    assert isinstance(found, Refusal) if result is None else found == result
    x = torch.arange(torch.Size(ins).numel()).view(ins)
    if result is not None:  # certificate: a head's elements are the same ones before and after
        assert all(_of_head(x, held, h) == _of_head(x.view(outs), result, h) for h in range(4))


def _of_head(x: Tensor, held: tuple[int, int], head: int) -> set[int]:
    dim, inner = held
    apart = x.unflatten(dim, (-1, 4, inner))
    return set(apart.select(dim + 1, head).flatten().tolist())
