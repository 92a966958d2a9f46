"""Build FX graphs node by node with fake values, so that every node knows its shape at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mstpass.graph.joint import JointGraph, tensors_of


class Builder:
    """Adds ``call_function`` nodes to a graph and computes their fake values under ``mode``."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self.graph, self.mode = graph, mode

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*map_values(args), **map_values(kwargs))
        return node

    def empty(self, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        """A contiguous fake tensor of the same dtype and device."""
        with self.mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)


def map_values(args: Any) -> Any:
    """Nodes replaced by their fake values."""
    return fx.map_arg(args, lambda node: node.meta["val"])


def fake_mode_of(nodes: Any) -> FakeTensorMode:
    """The fake mode that the nodes' values belong to.

    Raises:
        ValueError: no node has a fake tensor.
    """
    for node in nodes:
        for value in tensors_of(node.meta.get("val")):
            mode = getattr(value, "fake_mode", None)
            if mode is not None:
                assert isinstance(mode, FakeTensorMode)
                return mode
    raise ValueError("no node of the graph has a fake tensor as its value")


def copied(joint: JointGraph) -> JointGraph:
    """The same graph on nodes of its own, with the same names and values."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in joint.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    module = fx.GraphModule(joint.module, graph)
    module.meta = dict(joint.module.meta)
    return JointGraph(module, joint.num_fwd_outputs)
