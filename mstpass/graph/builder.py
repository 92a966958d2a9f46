"""Build FX graphs node by node with fake values, so that every node knows its shape at once."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from mstpass.graph.joint import JointGraph, tensors_of
from mstpass.graph.sizes import Size, expression, is_size
from mstpass.torch_internals.fake_tensors import FakeTensorMode


class Builder:
    """Adds ``call_function`` nodes to a graph and computes their fake values under ``mode``."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode):
        self.graph, self.mode = graph, mode

    def placeholder(self, name: str, value: torch.Tensor | int) -> fx.Node:
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


class UnknownSize(Exception):
    """No node of the graph holds a symbol, or the arithmetic on it is of an unusual kind."""


class SizeNodes:
    """The nodes of a graph under construction that hold sizes, so that shapes can be written."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.known: dict[sympy.Expr, fx.Node] = {}

    def learn(self, node: fx.Node) -> None:
        if is_size(node):
            self.known.setdefault(expression(node.meta["val"]), node)

    def arguments(self, shape: Iterable[Size]) -> list[int | fx.Node]:
        """A shape as an op's argument.

        Raises:
            UnknownSize: a size cannot be written.
        """
        return [size if isinstance(size, int) else self._node(expression(size)) for size in shape]

    def _node(self, expr: sympy.Expr) -> int | fx.Node:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if expr not in self.known:
            if expr.func not in _ARITHMETIC:
                raise UnknownSize(f"no node holds the size {expr}")
            first, *others = map(self._node, expr.args)
            built: Any = first
            for other in others:
                built = self.builder.call(_ARITHMETIC[expr.func], built, other)
            self.known[expr] = built
        return self.known[expr]


_ARITHMETIC = {sympy.Mul: operator.mul, sympy.Add: operator.add}


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


def sizes_from_inputs(joint: JointGraph) -> JointGraph:
    """A graph whose size nodes come from the step's inputs; the same one where they do already.

    A ``sym_size`` of a large value, as in the backward of a slice, would keep the value alive, or
    keep it from becoming a loop's.
    """
    asked = [n.name for n in joint.nodes if n.target is torch.ops.aten.sym_size.int]
    if not asked:
        return joint
    new = copied(joint)
    sizes = SizeNodes(Builder(new.module.graph, fake_mode_of(new.nodes)))
    for node in new.nodes:
        if node.op == "placeholder":
            sizes.learn(node)
    first = next(node for node in new.nodes if node.op != "placeholder")
    for name in asked:
        node = new.by_name[name]
        with contextlib.suppress(UnknownSize), new.module.graph.inserting_before(first):
            (size,) = sizes.arguments([node.meta["val"]])
            fx.map_arg(size, node.replace_all_uses_with)
    new.module.graph.eliminate_dead_code()
    new.module.graph.lint()
    new.module.recompile()
    return JointGraph(new.module, new.num_fwd_outputs)
