"""The fake values of views share the storages of the values that they are views of.

AOTAutograd tells by the fake storages which saved values backward may overwrite: those that share
none with what the forward returns to the caller (*donated* buffers, torch/_functorch/_aot_autograd/
graph_compile.py). Inductor tells by them where an op may write to its operand. A rewrite gives new
fake values to the nodes that it makes; a view of such a node, copied from the graph before, still
has the old storage. A result that the caller holds would then be overwritten by the backward.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.joint import tensors_of
from mstpass.torch_internals.fake_tensors import storage_key
from mstpass.torch_internals.graphs import OpOverload, returns_view

_MAY_BE_VIEWS = (torch.ops.aten.reshape.default, operator.getitem)


def share_storages(graph: fx.Graph) -> None:
    """Compute the fake values of views again that do not share their operand's storage, in place.

    A view that cannot be computed from its operand's new strides stays as it is: it will be a copy.
    """
    stale = [node for node in graph.nodes if may_be_view(node) and _is_stale(node)]
    if not stale:
        return
    builder = Builder(graph, fake_mode_of(graph.nodes))
    for node in graph.nodes:  # a view of a view that is made anew may be stale as well
        if may_be_view(node) and _is_stale(node):
            with contextlib.suppress(RuntimeError):
                builder.compute_value(node)


def may_be_view(node: fx.Node) -> bool:
    """Whether a result of the node may share the storage of what the node reads."""
    if node.op != "call_function":
        return False
    if node.target in _MAY_BE_VIEWS or ops.shares_storage(node):
        return True
    return isinstance(node.target, OpOverload) and returns_view(node.target)


def _is_stale(node: fx.Node) -> bool:
    own, operand = set(_storages(node)), set(_storages(node.all_input_nodes[0]))
    return bool(own and operand) and not own & operand


def _storages(node: fx.Node) -> Iterator[int]:
    for tensor in tensors_of(node.meta.get("val")):
        yield storage_key(tensor.untyped_storage())
