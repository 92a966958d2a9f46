"""Fake values stay exact where a rewrite puts other nodes into a graph.

A node that takes the place of another may hold the same elements in another order of memory, as
another kernel of attention or a loop over heads does, and it has a storage of its own. The recorded
strides of all that is computed from it are then wrong, and so are the storages of its views. Later
passes and Inductor read both; AOTAutograd tells by the storages which saved values the backward may
overwrite (``share_storages``).

``share_storages``: fake values of views share the storages of the values that they show.

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
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import ADDED, Builder, fake_mode_of
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.sizes import fills_memory, generic_shape, generic_stride, outer_to_inner
from mstpass.torch_internals.fake_tensors import binds_size, storage_key
from mstpass.torch_internals.graphs import OpOverload, returns_view

aten = torch.ops.aten


class CannotRenew(Exception):
    """An op cannot read the new strides; the message says which."""


class Renewal:
    """The values of one graph under construction that are not where, or not as, they were.

    Attributes:
        moved: the nodes with another storage than was recorded.
        strided: those of them whose strides, shape or dtype differ as well.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.moved: set[fx.Node] = set()
        self.strided: set[fx.Node] = set()

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """Note that a node stands in the place of another one. Sizes have no storage."""
        layout = layout_of(new)
        if layout:
            self.moved.add(new)
        if layout != layout_of(old):
            self.strided.add(new)

    def renew(self, node: fx.Node) -> None:
        """Compute the node's value again, in place, if it follows from one that has changed.

        Call it for the nodes in their order.

        Raises:
            CannotRenew: the op cannot read the new strides.
        """
        if node.op != "call_function" or node.target is mst_loop:  # whose results lie in rows
            return
        if not self.strided.isdisjoint(node.all_input_nodes):
            self.moved.add(node)
            if renew_value(node):
                self.strided.add(node)
        elif not self.moved.isdisjoint(node.all_input_nodes) and may_be_view(node):
            self.moved.add(node)
            _compute(node)

    def with_layout_of(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """The value with the strides that are recorded for another node: what a step returns.

        It stays as it is where those are not the strides of a copy, as an expanded value's are.
        """
        recorded, value = value_of(old), value_of(new)
        if recorded is None or value is None or defined_strides(recorded) == defined_strides(value):
            return new
        order = order_of_copy(recorded)
        if order is None:
            return new
        call: Any = Builder(self.graph, fake_mode_of([new]), ADDED).call
        rows = call(aten.permute.default, new, order)
        copy = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        return call(aten.permute.default, copy, sorted(order, key=order.__getitem__))


def renew_value(node: fx.Node) -> bool:
    """Compute a node's value again. Whether its strides, shape or dtype changed.

    A view by shape copies where the strides allow no view, as Inductor has it.

    Raises:
        CannotRenew: the op cannot read its operands.
    """
    if ops.is_view_by_shape(node):
        node.target = aten.reshape.default
    before = layout_of(node)
    _compute(node)
    return layout_of(node) != before


def _compute(node: fx.Node) -> None:
    if binds_size(node):
        return  # a new value would have a new size
    try:
        Builder(node.graph, fake_mode_of((node, *node.all_input_nodes))).compute_value(node)
    except Exception as error:
        raise CannotRenew(f"{node.name} cannot read other strides: {error}") from error


def order_of_copy(tensor: torch.Tensor) -> list[int] | None:
    """The dims in the order in which they lie in memory; None if they do not fill a block of it."""
    order = outer_to_inner(tensor)
    fills = fills_memory(generic_shape(tensor), generic_stride(tensor), order)
    return order if fills else None


def layout_of(node: fx.Node) -> list[object]:
    """The shapes, strides and dtypes of a node's tensors; the strides of dims of one element do not
    count."""
    return [
        (generic_shape(t), defined_strides(t), t.dtype) for t in tensors_of(node.meta.get("val"))
    ]


def defined_strides(tensor: torch.Tensor) -> list[object]:
    """The strides along which there is more than one element; None for the others."""
    shape = generic_shape(tensor)
    if 0 in shape:
        return [None] * len(shape)
    pairs = zip(shape, generic_stride(tensor), strict=True)
    return [None if size == 1 else stride for size, stride in pairs]


# ---- views ---------------------------------------------------------------------------------------
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
