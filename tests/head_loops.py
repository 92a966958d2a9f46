"""Loops over groups of heads in a joint graph, run against the graph without loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mstpass.graph.attention import is_product
from mstpass.graph.joint import JointGraph
from mstpass.loops.apply_plans import apply_plans
from mstpass.loops.plan_region import RegionPlanner
from mstpass.options import Options
from mstpass.plans import ChunkPlan, Region
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from tests.checks import Seeded


def skip_without_float64_attention() -> None:
    """Skip tests in float64 where this torch has no attention in it."""
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 8, dtype=torch.float64)
        logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)[1]
    if logsumexp.dtype != torch.float64:
        pytest.skip("torch 2.11 says that the logarithms of float64 attention are float32")


def plan_of(
    joint: JointGraph, region: Region, heads: int, kept: Callable[[fx.Node], bool] | None = None
) -> ChunkPlan:
    """The region in loops over groups of this many heads.

    ``kept`` says which products backward may not compute again; None: all of them may be.
    """
    planner = RegionPlanner(joint, region, Options())
    members = planner.facts.specs
    products = frozenset(n.name for n in members if is_product(n) and not (kept and kept(n)))
    plan = planner.plan("save" if kept else "recompute", products, region.num_tokens // heads)
    assert isinstance(plan, ChunkPlan), plan
    return plan


def results(module: fx.GraphModule) -> list[Tensor]:
    """What a joint graph returns for random inputs, the same ones for equal placeholders."""
    torch.manual_seed(1)
    inputs: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        inputs.append(torch.randn(value.shape, dtype=value.dtype))
    returned = pytree.tree_leaves(Seeded(module).run(*inputs))
    return [value for value in returned if isinstance(value, Tensor)]


def check_loops(joint: JointGraph, region: Region, tolerance: float = 1e-9) -> ChunkPlan:
    """Run the graph with its loops, in several modes and lengths, against the graph without."""
    exact = results(joint.module)
    kept: tuple[Callable[[fx.Node], bool] | None, ...] = (
        None,
        lambda node: "attention" in str(node.target),
        lambda node: True,
    )
    for heads in {1, region.num_tokens // 2}:
        for which in kept:
            plan = plan_of(joint, region, heads, which)
            loops = results(apply_plans(joint, [plan]).module)
            for value, right in zip(loops, exact, strict=True):
                assert (value - right).norm() <= tolerance * right.norm()
    return plan_of(joint, region, 1)
