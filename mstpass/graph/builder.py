"""Build FX graphs node by node: every new node gets its fake value, and so its shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import Size, expression, is_size, same_shape
from mstpass.torch_internals.fake_tensors import FakeTensorMode

ADDED = "mst_added"  # the name of calls that a graph has beside those of the graph that it is from


class Builder:
    """Adds nodes to a graph, where the graph inserts, and computes their fake values.

    Attributes:
        name: the name of all calls, with a number; None: each has that of its op. Where the graph
            takes nodes of another one, that leaves their names to them.
        meta: what all calls have besides their values.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, name: str | None = None):
        self.graph, self.mode, self.name = graph, mode, name
        self.meta: dict[str, Any] = {}

    def placeholder(self, name: str, value: torch.Tensor | int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls ``target``; nodes may stand anywhere in the arguments."""
        node = self.graph.create_node("call_function", target, args, kwargs, self.name)
        node.meta.update(self.meta)
        self.compute_value(node)
        return node

    def copy(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """A node of another graph once more, with other operands."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        built = self.graph.create_node(node.op, node.target, args, kwargs, self.name, node.type)
        built.meta.update(node.meta)
        return built

    def compute_value(self, node: fx.Node) -> None:
        """Compute the fake value of a node from those of its operands."""
        target: Any = node.target
        with self.mode:
            node.meta["val"] = target(*fake_values(node.args), **fake_values(node.kwargs))

    def empty(self, shape: list[int], like: torch.Tensor) -> torch.Tensor:
        """A contiguous fake tensor of this shape, with the dtype and device of ``like``."""
        with self.mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def filled(self, shape: Sequence[Any], number: float, like: torch.Tensor) -> fx.Node:
        """A constant of this shape, with the dtype and device of ``like``."""
        full = torch.ops.aten.full.default
        return self.call(full, list(shape), number, dtype=like.dtype, device=like.device)

    def sized(self, value: torch.Tensor | Size, size: Callable[[Size], int]) -> torch.Tensor | int:
        """A fake value like this one, with plain ints in place of its symbolic sizes."""
        if not isinstance(value, torch.Tensor):
            return size(value)
        shape, stride = (list(map(size, sizes)) for sizes in (value.shape, value.stride()))
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    def compute_values(self, inputs: Mapping[fx.Node, torch.Tensor | int]) -> None:
        """Compute the values of all nodes once more, with these values of the inputs."""
        for node in self.graph.nodes:
            if node in inputs:
                node.meta["val"] = inputs[node]
            elif node.op == "call_function":
                self.compute_value(node)


class UnknownSize(Exception):
    """A symbolic size cannot be written as an argument.

    No node of the graph holds its symbols, or it is made by other arithmetic than sums and
    products.
    """


class SizeNodes:
    """Which node of a graph under construction holds which symbolic size.

    An op's argument cannot hold a ``SymInt`` of its own: it must refer to a node with that value.
    """

    def __init__(self, builder: Builder):
        self.builder = builder
        self.known: dict[sympy.Expr, fx.Node] = {}

    @staticmethod
    def of_inputs(builder: Builder) -> SizeNodes:
        """The sizes that the placeholders of the builder's graph hold."""
        sizes = SizeNodes(builder)
        for node in builder.graph.find_nodes(op="placeholder"):
            sizes.learn(node)
        return sizes

    def learn(self, node: fx.Node) -> None:
        """Note the node if it holds a size."""
        if is_size(node):
            self.known.setdefault(expression(node.meta["val"]), node)

    def learn_dim(self, node: fx.Node, dim: int) -> None:
        """Let a symbolic size of a tensor be written, after that tensor."""
        size = node.meta["val"].shape[dim]
        if isinstance(size, torch.SymInt) and expression(size) not in self.known:
            self.learn(self.builder.call(torch.ops.aten.sym_size.int, node, dim))

    def arguments(self, shape: Iterable[Size | fx.Node]) -> list[int | fx.Node]:
        """A shape as an op's argument: ints and nodes. Adds nodes for sums and products of sizes.

        A size that is a node already stays as it is.

        Raises:
            UnknownSize: a size cannot be written.
        """
        return [s if isinstance(s, int | fx.Node) else self._node(expression(s)) for s in shape]

    def reshaped(self, node: fx.Node, shape: Iterable[Any]) -> fx.Node:
        """The node in a shape, which is written as ``arguments``; the node itself if it has it."""
        shape = list(shape)
        if same_shape(node.meta["val"].shape, fake_values(shape)):
            return node
        return self.builder.call(torch.ops.aten.reshape.default, node, self.arguments(shape))

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


def fake_values(args: Any) -> Any:
    """The arguments with every node replaced by its fake value."""
    return fx.map_arg(args, lambda node: node.meta["val"])


def fake_mode_of(nodes: Any) -> FakeTensorMode:
    """The fake mode to which the values of the nodes belong.

    Raises:
        ValueError: no node has a fake tensor.
    """
    for node in nodes:
        for value in tensors_of(node.meta.get("val")):
            mode = getattr(value, "fake_mode", None)
            if mode is not None:
                assert isinstance(mode, FakeTensorMode), "the mode is a mode of fake tensors"
                return mode
    raise ValueError("no node of the graph has a fake tensor as its value")
