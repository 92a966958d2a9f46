"""Whether a node's recorded fake value is the one that its op gives.

The op runs on the recorded values of its operands, under their fake mode, and adds no guard. What
is compared: sizes and strides at the generic point (graph/sizes.py), dtype, device, and, for views,
with which operands a result shares its storage. The stride of a dim of one element is not defined.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph.builder import fake_mode_of
from mstpass.graph.joint import tensors_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.renew_values import defined_strides
from mstpass.graph.sizes import depends_on_data, generic, generic_shape, hint_shape
from mstpass.graph.view_storages import may_be_view
from mstpass.torch_internals.fake_tensors import binds_size, storage_key, without_guards
from mstpass.torch_internals.graphs import HigherOrderOperator, OpOverload, schema_of


def signature(node: fx.Node) -> object:
    """The same for two nodes with one op, one recorded value, and operands of the same values."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: id(n.meta.get("val", n.target)))
    return node.target, id(node.meta.get("val")), arguments


_LOOPS = (mst_loop, torch.ops.higher_order.while_loop)


def difference(node: fx.Node, storages: bool = True) -> str:
    """How the recorded value differs from the op's; empty if it does not, or cannot be computed.

    Args:
        storages: compare those of views, too.
    """
    if not _is_computed(node):
        return ""
    recorded = node.meta["val"]
    try:
        value = _computed(node)
    except Exception as error:
        return f"its op cannot read its operands: {type(error).__name__}: {error}"
    if isinstance(recorded, torch.SymInt | int) and isinstance(value, torch.SymInt | int):
        same = generic(recorded) == generic(value)
        return "" if same else f"is recorded as {recorded}, but is {value}"
    results, values = list(tensors_of(recorded)), list(tensors_of(value))
    if len(results) != len(values):
        return "has another number of results than is recorded"
    for known, now in zip(results, values, strict=True):
        if found := layout_difference(known, now):
            return found
        if not storages or not may_be_view(node) or _is_item_of_subgraph(node):
            continue
        if _shared_with(node, known) != _shared_with(node, now):
            return "is recorded with another storage than that of the value that it is a view of"
    return ""


def layout_difference(
    recorded: torch.Tensor, value: torch.Tensor, of_traced_batch: bool = False
) -> str:
    """How two fake tensors differ; empty if they do not.

    Args:
        of_traced_batch: compare sizes as in the batch that was traced, and no strides.
    """
    shape_of = hint_shape if of_traced_batch else generic_shape
    if list(shape_of(recorded)) != list(shape_of(value)):
        return f"shape is recorded as {tuple(recorded.shape)}, but is {tuple(value.shape)}"
    if recorded.dtype != value.dtype:
        return f"dtype is recorded as {recorded.dtype}, but is {value.dtype}"
    if recorded.device != value.device:
        return f"device is recorded as {recorded.device}, but is {value.device}"
    if not of_traced_batch and defined_strides(recorded) != defined_strides(value):
        return f"strides are recorded as {recorded.stride()}, but is {value.stride()}"
    return ""


def _is_computed(node: fx.Node) -> bool:
    """Whether the op can run on fake values: it writes to none, and no size depends on data."""
    if node.op != "call_function" or "val" not in node.meta or node.target is mst_loop:
        return False
    if isinstance(node.target, OpOverload):
        if schema_of(node.target).is_mutable:
            return False
    elif node.target is not operator.getitem and not _is_arithmetic(node):
        return False
    if any("val" not in n.meta for n in node.all_input_nodes):
        return False
    return not binds_size(node) and not any(map(_has_unknown_size, (node, *node.all_input_nodes)))


def _is_item_of_subgraph(node: fx.Node) -> bool:
    """Whether it is a result of a higher-order op but a loop: its storage is the tracer's."""
    if node.target is not operator.getitem:
        return False
    target = node.all_input_nodes[0].target
    return isinstance(target, HigherOrderOperator) and target not in _LOOPS


def _is_arithmetic(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "_operator"


def _has_unknown_size(node: fx.Node) -> bool:
    value = node.meta["val"]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return not value.node.has_hint()  # of two expressions, which is which is not known
    return any(map(depends_on_data, tensors_of(value)))


def _computed(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    target: Any = node.target
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # arithmetic with sizes has no tensor
            stack.enter_context(without_guards(fake_mode_of((node, *node.all_input_nodes))))
        return target(*args, **kwargs)


def _shared_with(node: fx.Node, tensor: torch.Tensor) -> list[bool]:
    """Of each operand, whether the tensor shares its storage."""
    own = storage_key(tensor.untyped_storage())
    return [own in set(_storages(operand)) for operand in node.all_input_nodes]


def _storages(node: fx.Node) -> Iterator[int]:
    for tensor in tensors_of(node.meta["val"]):
        yield storage_key(tensor.untyped_storage())
