"""Run a joint graph, before and after it is normalized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mstpass.graph.joint import JointGraph
from mstpass.normalize import normalized
from tests.checks import joint_graph


def run(module: fx.GraphModule) -> list[Tensor]:
    """What a joint graph returns for random inputs, the same ones for equal placeholders."""
    torch.manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if value.is_floating_point():
            inputs.append(torch.randn(value.shape, dtype=torch.float32).to(value.dtype))
        else:
            inputs.append(torch.randint(2, value.shape).to(value.dtype))
    returned = pytree.tree_leaves(fx.Interpreter(module).run(*inputs))
    return [value for value in returned if isinstance(value, Tensor)]


def check_same_results(step: Callable[..., Any], *inputs: Tensor) -> frozenset[str]:
    """Check that the normalized graph computes what the graph computes.

    Returns:
        The names of the nodes that normalization changed or made.
    """
    joint = JointGraph(*joint_graph(step, *inputs))
    plain, prepared, changed = normalized(joint)
    results = run(prepared.module)
    assert len(results) > 1
    for got, right in zip(results, run(plain.module), strict=True):
        torch.testing.assert_close(got, right)
    return changed
