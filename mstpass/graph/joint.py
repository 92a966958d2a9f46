"""The joint forward-backward graph as the passes read it: order, phases, users, bytes, storages.

Terms: a *tangent* is a gradient that enters backward; a node is *backward* when it needs a
tangent; a *view* shares the storage of another value (``base_of``).

AOTAutograd names the joint graph's placeholders ``primals_i`` and ``tangents_i`` and puts the
forward outputs before the gradients in the output node (torch/_functorch/partitioners.py;
probed in torch_internals/compile_fx.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from mstpass.graph.sizes import generic_numel, hint_numel
from mstpass.torch_internals.op_types import OpOverload, schema_of

T = TypeVar("T")
Modules = tuple[fx.GraphModule, fx.GraphModule]  # forward and backward


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a node's ``meta["val"]``: one, several (tuple outputs), or none."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node with one tensor output, else None."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def numel(node: fx.Node) -> int:
    """Elements of the node's largest tensor, at the generic point of sizes.py; 0 without one."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return generic_numel(value)
    return max(map(generic_numel, tensors_of(value)), default=0)


def nbytes(node: fx.Node) -> int:
    """Bytes of all tensors of the node; symbolic sizes count with their hint."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value)
    return sum(map(_tensor_bytes, tensors_of(value)))


def _tensor_bytes(value: torch.Tensor) -> int:
    return hint_numel(value) * value.element_size()


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and all they need."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


class JointGraph:
    """Read-only facts about one joint graph. Changes nothing in it."""

    def __init__(self, module: fx.GraphModule, num_fwd_outputs: int):
        self.module = module
        self.num_fwd_outputs = num_fwd_outputs
        self.nodes: list[fx.Node] = list(module.graph.nodes)
        self.index: dict[fx.Node, int] = {n: i for i, n in enumerate(self.nodes)}
        self.by_name: dict[str, fx.Node] = {n.name: n for n in self.nodes}
        self.output = self.nodes[-1]
        outputs = self.output.args[0]
        assert isinstance(outputs, tuple | list)
        self.forward_outputs = [n for n in outputs[:num_fwd_outputs] if isinstance(n, fx.Node)]
        self.backward_outputs = [n for n in outputs[num_fwd_outputs:] if isinstance(n, fx.Node)]

    def once(self, analysis: Callable[[JointGraph], T]) -> T:
        """``analysis`` of this graph, made at the first call: the graph does not change."""
        if analysis not in self._known:
            self._known[analysis] = analysis(self)
        found: T = self._known[analysis]
        return found

    @cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    @cached_property
    def backward(self) -> set[fx.Node]:
        """Nodes that need a tangent (the tangents included)."""
        found: set[fx.Node] = set()
        for node in self.nodes[:-1]:
            if is_tangent(node) or any(i in found for i in node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def forward(self) -> set[fx.Node]:
        """Nodes that the forward outputs need."""
        return ancestors(self.forward_outputs)

    @cached_property
    def output_nodes(self) -> set[fx.Node]:
        return set(self.forward_outputs) | set(self.backward_outputs)

    @cached_property
    def has_side_effects(self) -> bool:
        """Whether an op writes to its inputs (a mutated buffer or parameter)."""
        return any(_writes(n) for n in self.nodes)

    def sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """In the graph's order."""
        return sorted(nodes, key=self.index.__getitem__)

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Users in the graph's order (``node.users`` keeps insertion order)."""
        return self.sorted(node.users)
