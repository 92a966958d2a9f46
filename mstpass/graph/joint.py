"""The joint graph: one FX graph with the forward and the backward of a training step.

Terms:
    *tangent*: the gradient of a forward output, an input of the backward.
    *backward node*: a node that depends on a tangent. All others are forward nodes, though not all
        of them are needed by a forward output.

Source: AOTAutograd names the placeholders ``primals_i`` and ``tangents_i`` and puts the forward
outputs before the gradients in the output node (torch/_functorch/partitioners.py; probed in
torch_internals/probes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import fx

from mstpass.graph.sizes import expression, generic_numel, hint_numel, is_size, symbols_of
from mstpass.torch_internals.aot_autograd import is_write_of_backward
from mstpass.torch_internals.graphs import OpOverload, graph_module, schema_of
from mstpass.walk import walk_once

T = TypeVar("T")
Modules = tuple[fx.GraphModule, fx.GraphModule]  # (forward, backward)


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a node's ``meta["val"]``: one, several if the op returns a tuple, or none."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of the node; None if its op does not return exactly one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def numel(node: fx.Node) -> int:
    """The number of elements of the node's largest tensor; 0 if it has none.

    Symbolic sizes count with their value at the generic point (sizes.py).
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return generic_numel(value)
    return max(map(generic_numel, tensors_of(value)), default=0)


def nbytes(node: fx.Node) -> int:
    """The bytes of all tensors of the node; symbolic sizes count with their hint (sizes.py)."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    return sum(map(_tensor_bytes, tensors_of(value)))


def _tensor_bytes(value: torch.Tensor) -> int:
    return hint_numel(value) * value.element_size()


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and all nodes that they depend on."""
    return set(walk_once(roots, lambda node: node.all_input_nodes))


def descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and all nodes that depend on them."""
    return set(walk_once(roots, lambda node: node.users))


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


class JointGraph:
    """One joint graph, read only: its nodes in order, their phases, users and outputs.

    Attributes:
        index: the position of each node in ``nodes``.
        output: the output node.
        forward_outputs: the results of the forward.
        backward_outputs: the gradients of the step's inputs.
        replaced: of nodes that rewrites have replaced, the names of those in their place, which
            may have been replaced in turn.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        num_fwd_outputs: int,
        replaced: Mapping[str, str] = MappingProxyType({}),
    ):
        self.module, self.replaced = module, replaced
        self.num_fwd_outputs = num_fwd_outputs
        self.nodes: list[fx.Node] = list(module.graph.nodes)
        self.index: dict[fx.Node, int] = {n: i for i, n in enumerate(self.nodes)}
        self.by_name: dict[str, fx.Node] = {n.name: n for n in self.nodes}
        self.output = self.nodes[-1]
        outputs = self.output.args[0]
        if not isinstance(outputs, tuple | list):  # a subgraph's, as of FlexAttention
            outputs = (outputs,)
        self.forward_outputs = [n for n in outputs[:num_fwd_outputs] if isinstance(n, fx.Node)]
        self.backward_outputs = [n for n in outputs[num_fwd_outputs:] if isinstance(n, fx.Node)]
        self._results: dict[object, Any] = {}

    def cached(self, analysis: Callable[[JointGraph], T]) -> T:
        """The result of ``analysis(self)``, computed at the first call: the graph never changes."""
        if analysis not in self._results:
            self._results[analysis] = analysis(self)
        result: T = self._results[analysis]
        return result

    def copy(self) -> JointGraph:
        """The same graph on nodes of its own, with the same names and values."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        module = graph_module(self.module, graph)
        module.meta = dict(self.module.meta)
        return JointGraph(module, self.num_fwd_outputs, self.replaced)

    @cached_property
    def backward(self) -> set[fx.Node]:
        """The backward nodes: the tangents and all nodes that depend on one."""
        return descendants(filter(is_tangent, self.nodes)) - {self.output}

    @cached_property
    def forward(self) -> set[fx.Node]:
        """The nodes that a forward output depends on, or a write that the forward makes."""
        return ancestors((*self.forward_outputs, *self.forward_writes))

    @cached_property
    def forward_writes(self) -> list[fx.Node]:
        """The ops of the forward that write to their operands, as the update of a buffer does."""
        return [n for n in self.nodes if _mutates(n) and not is_write_of_backward(n)]

    @cached_property
    def backward_writes(self) -> list[fx.Node]:
        """Those of the backward."""
        return [n for n in self.nodes if _mutates(n) and is_write_of_backward(n)]

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes in the graph's order."""
        return sorted(nodes, key=self.index.__getitem__)

    def inputs_with_symbols_of(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The inputs of the step that hold the symbols in the sizes of the nodes' tensors."""
        values = (value for node in nodes for value in tensors_of(node.meta.get("val")))
        symbols = {symbol for value in values for symbol in symbols_of(value)}
        inputs = self.module.graph.find_nodes(op="placeholder")
        return [n for n in inputs if is_size(n) and expression(n.meta["val"]) in symbols]

    def standing_for(self, name: str) -> str | None:
        """The name of the node that holds what a node held before rewrites; None if none does."""
        passed = set[str]()
        while name not in self.by_name and name in self.replaced and name not in passed:
            passed.add(name)
            name = self.replaced[name]
        return name if name in self.by_name else None

    def new_names(self, before: JointGraph) -> frozenset[str]:
        """The names of the nodes that a graph before a rewrite does not have."""
        return frozenset(self.by_name.keys() - before.by_name.keys())

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The users of a node in the graph's order (``node.users`` has the order of creation)."""
        return self.sorted(node.users)
