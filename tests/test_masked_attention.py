"""Attention with a mask that depends on data runs in loops over rows of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.graph.attention import mask_of
from mstpass.graph.joint import JointGraph
from mstpass.graph.sizes import is_static
from mstpass.regions.attention import NOT_BY_ROW, detect_masked_attention
from tests.checks import check_against_float64, joint_graph

pytestmark = pytest.mark.op_by_op

LEAST = {"memory_budget": 0.0}
B, N, D, HEADS, LAYERS = 2, 1024, 32, 2, 2


def padded(keys_BN: Tensor) -> Tensor:
    """Causal, and no key that is padding; a query sees itself, so that no row is empty."""
    place = torch.arange(keys_BN.shape[1])
    causal = place[:, None] >= place
    itself = place[:, None] == place
    return (causal & keys_BN[:, None, None, :].bool()) | itself


def documents(document_BN: Tensor) -> Tensor:
    """Causal within the documents of packed sequences."""
    place = torch.arange(document_BN.shape[1])
    same = document_BN[:, None, :, None] == document_BN[:, None, None, :]
    return (place[:, None] >= place) & same


class Layers(nn.Module):
    """Attention with its projections, and a residual stream; all layers have one mask."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(LAYERS))

    def loss(self, x_BND: Tensor, values_BN: Tensor) -> Tensor:
        mask = self.mask(values_BN)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            apart = qkv(x_BND).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = apart.unbind()
            result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x_BND = x_BND + out(result.transpose(1, 2).flatten(2))
        return x_BND.square().mean()


def _inputs(mask: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    place = torch.arange(N)
    values = place < torch.tensor([[N], [700]]) if mask is padded else place // 300
    return [torch.randn(B, N, D, requires_grad=True), values.long().expand(B, N).contiguous()]


def _loss_of(model: nn.Module) -> Callable[..., Tensor]:
    assert isinstance(model, Layers)
    return model.loss


@pytest.mark.parametrize("mask", [padded, documents])
def test_its_mask_exists_in_chunks(mask: Callable[[Tensor], Tensor]) -> None:
    model = Layers(mask)
    report: Any = check_against_float64(model, _loss_of, _inputs(mask), memory_budget=0.0)
    attention = [region for region in report.regions if region.kind == "attention"]
    assert [(region.axis, region.num_chunks) for region in attention] == [("queries", 2)] * LAYERS
    square = B * N * N * 4
    assert report.peak_bytes < square < report.baseline_peak_bytes
    assert not _masks(report)


def _masks(report: mstpass.Report) -> list[mstpass.Rejection]:
    return [r for r in report.rejections if "reads this mask whole" in r.reason]


def test_a_mask_of_any_length_stays_whole_and_the_length_open() -> None:
    joint = JointGraph(*joint_graph(Layers(documents).loss, *_inputs(documents), dynamic=True))
    regions, rejections = detect_masked_attention(joint)
    assert not regions and {r.reason for r in rejections} == {NOT_BY_ROW}
    masks = [mask.meta["val"] for mask in map(mask_of, joint.nodes) if mask is not None]
    assert masks and not any(map(is_static, masks))


def test_a_mask_that_is_an_input_stays_whole() -> None:
    model = Layers(lambda mask: mask)
    mask = torch.ones(B, 1, N, N, dtype=torch.bool)
    report = mstpass.explain(model.loss, _inputs(padded)[0], mask, options=LEAST)
    assert "queries" not in {region.axis for region in report.regions}
    (whole,) = _masks(report)
    assert "2 x 1 x 1024 x 1024 in float32" in whole.reason and whole.bytes == B * N * N * 4
    assert "no attention mask" in whole.fix and "varlen" in whole.fix
    assert "8.0 MiB" in str(report) and "reads this mask whole" in str(report)


@pytest.mark.parametrize("tokens", [1000, 256])
def test_rows_that_do_not_divide_have_no_loops_over_queries(tokens: int) -> None:
    """Neither those that are no whole blocks of the kernels, nor those too few for two chunks."""
    model = Layers(padded)
    inputs = (v[:, :tokens].detach().requires_grad_(v.requires_grad) for v in _inputs(padded))
    report = mstpass.explain(model.loss, *inputs, options=LEAST)
    assert "queries" not in {region.axis for region in report.regions}
