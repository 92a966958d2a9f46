"""Calls on tensors that are too large for their kernels, on a pretended GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import mstpass
from mstpass.graph.narrow_offsets import narrow_calls
from mstpass.linter.graph_findings import read_graphs
from mstpass.linter.report import NARROW
from mstpass.tracing.devices import traced_for
from mstpass.tracing.joint_graphs import trace_one_graph

HEADS, HEAD_DIM = 32, 128
MOST = 2**31 // (HEADS * HEAD_DIM)  # tokens
BF16, FP32 = torch.bfloat16, torch.float32


def _loss(mask: bool = False):
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        q = (x @ weight).view(1, x.shape[1], -1, HEAD_DIM).transpose(1, 2)
        place = torch.arange(x.shape[1], device=x.device)
        allowed = (place[:, None] // 7 >= place // 7)[None, None] if mask else None
        attended = F.scaled_dot_product_attention(q, q, q, attn_mask=allowed, is_causal=not mask)
        return attended.float().square().mean()

    return loss


def _inputs(tokens: int, dtype: torch.dtype = BF16, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    shapes = (1, tokens, 64), (64, heads * HEAD_DIM)
    x, weight = (torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes)
    return x, weight


def _graph(gpu: str, tokens: int, mask: bool = False, **more) -> GraphModule:
    with traced_for("cuda", gpu) as device:
        take = lambda joint, _: joint
        inputs = _inputs(tokens, **more)
        return trace_one_graph(_loss(mask), inputs, {}, take, device=device)


# ---- which calls ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gpu", "tokens", "narrow"),
    [("a100", MOST, False), ("a100", MOST + 1, True), ("h100", MOST + 1, False)],
)
def test_the_backward_of_flash_attention(gpu: str, tokens: int, narrow: bool) -> None:
    found = narrow_calls([_graph(gpu, tokens).graph])
    assert [call.op for call in found] == narrow * [
        "aten._scaled_dot_product_flash_attention_backward.default"
    ]
    assert all(f"{tokens:,} tokens x 32 heads x 128" in call.why for call in found)


@pytest.mark.parametrize(("longest", "narrow"), [(2**18, False), (2**20, True)])
def test_sequences_in_one_row(longest: int, narrow: bool) -> None:
    """The longest sequence decides, not how many there are."""
    op = torch.ops.aten._flash_attention_backward.default
    graph = torch.fx.Graph()
    with traced_for("cuda", "a100"), torch._subclasses.FakeTensorMode():
        row = torch.empty(2**20, HEADS, HEAD_DIM, dtype=BF16, device="cuda")
        starts = torch.empty(5, dtype=torch.int32, device="cuda")
    q, s = graph.placeholder("q"), graph.placeholder("s")
    q.meta["val"], s.meta["val"] = row, starts
    call = graph.call_function(op, (q, q, q, q, q, q, s, s, longest, longest, 0.0, True, q, q))
    call.meta["val"] = (row, row, row)
    graph.output(call)
    assert len(narrow_calls([graph])) == narrow


@pytest.mark.parametrize(("tokens", "narrow"), [(65_536, False), (65_600, True)])
def test_the_mask_of_efficient_attention(tokens: int, narrow: bool) -> None:
    found = narrow_calls([_graph("4090", tokens, True, dtype=FP32, heads=1).graph])
    assert [call.op for call in found] == narrow * [
        "aten._scaled_dot_product_efficient_attention.default"
    ]


def test_a_kernel_from_elsewhere() -> None:
    """Nothing is known of it, so it is named from 2^31 elements on."""
    with torch.library._scoped_library("elsewhere", "DEF") as library:
        library.define("scan(Tensor x) -> Tensor")
        library.impl("scan", torch.empty_like, "Meta")
        for tokens, narrow in ((2**19, False), (2**19 + 1, True)):
            module = torch.fx.Graph()
            x = module.placeholder("x")
            y = module.call_function(torch.ops.elsewhere.scan.default, (x,))
            module.output(y)
            with traced_for("cuda", "h100"), torch._subclasses.FakeTensorMode():
                for node in (x, y):
                    node.meta["val"] = torch.empty(tokens, 4096, device="cuda")
            found = narrow_calls([module])
            assert [call.node for call in found] == narrow * [y.name]
            assert all("not torch's" in call.why for call in found)


def test_a_cpu_has_none() -> None:
    inputs = _inputs(MOST + 128)
    with traced_for(None, None):
        graph = trace_one_graph(_loss(), inputs, {}, lambda joint, _: joint).graph
    assert not narrow_calls([graph])


# ---- who says so ---------------------------------------------------------------------------------
def test_a_step_is_explained_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="offsets in 32 bits"):
        report = mstpass.explain(_loss(), *_inputs(MOST + 128), device="cuda", gpu="a100")
    assert any("in groups of heads" in note for note in report.outcome.notes)


def test_in_groups_of_heads_there_is_nothing_to_say() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mstpass")
        report = mstpass.explain(
            _loss(),
            *_inputs(MOST + 128),
            device="cuda",
            gpu="a100",
            options={"memory_budget": 0.0},
        )
    (region,) = report.regions
    assert region.kind == "attention"
    assert not report.outcome.notes


def test_the_linter_names_it() -> None:
    report = read_graphs(_graph("a100", MOST + 128))
    (finding,) = (f for f in report.findings if f.kind == NARROW)
    assert finding in report.above(0.5).findings
    text = str(report)
    assert "32-bit offsets" in text and "in groups of heads" in text
    assert "ran     0x" not in text
