"""What may hold of a graph, and how it is checked: plain data, which passes name.

A fact is checked of a graph and the one before it. What was wrong before is not found again: the
tracer's and Inductor's own passes leave wrong values behind (docs/pytorch-internals.md). Only nodes
that have changed are looked at, so that a check costs as much as the pass changed.

*Values*: whether a node's recorded fake value is the one that its op gives. The op runs on the
recorded values of its operands, under their fake mode, and adds no guard. What is compared: sizes
and strides at the generic point (graph/sizes.py), dtype, device, and, for views, with which
operands a result shares its storage. The stride of a dim of one element is not defined.

*Loops*: the body of a loop has to be as pure as ``mst_loop`` claims: nothing is written but what
the body has made itself, and no rank waits for another. Its results are as the loop says.

A body has the symbolic sizes of the batch that was traced (loops/body/build.py).

The strides of a body's inputs are those of rows of their own. The lowering traces the body again,
with those of the operands, so ops in it that need others copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import fake_mode_of
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import JointGraph, tensors_of, value_of
from mstpass.graph.loop_op import mst_loop, stacked_dim
from mstpass.graph.recompute_rules import BEFORE_WRITE
from mstpass.graph.renew_values import defined_strides, may_be_view, order_of_copy
from mstpass.graph.sizes import depends_on_data, generic, generic_shape, hint_shape
from mstpass.torch_internals.fake_tensors import binds_size, storage_key, without_guards
from mstpass.torch_internals.graphs import HigherOrderOperator, OpOverload, schema_of
from mstpass.walk import walk


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


def layout_difference(recorded: torch.Tensor, value: torch.Tensor) -> str:
    """How two fake tensors differ; empty if they do not."""
    if list(generic_shape(recorded)) != list(generic_shape(value)):
        return f"shape is recorded as {tuple(recorded.shape)}, but is {tuple(value.shape)}"
    if recorded.dtype != value.dtype:
        return f"dtype is recorded as {recorded.dtype}, but is {value.dtype}"
    if recorded.device != value.device:
        return f"device is recorded as {recorded.device}, but is {value.device}"
    if defined_strides(recorded) != defined_strides(value):
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


# ---- bodies of loops -----------------------------------------------------------------------------
def body_differences(loop: fx.Node, body: fx.Graph) -> Iterator[str]:
    """What is wrong with the body of a loop."""
    for node in body.nodes:
        if is_collective(node) or is_wait(node):
            yield f"its body exchanges data between ranks ({node.name})"
        elif _writes_to_operand(node, body):
            yield f"its body writes to an operand ({node.name})"
        elif found := difference(node, storages=False):  # the lowering traces it anew
            yield f"{node.name} in its body {found}"
    yield from _result_differences(loop, body)


def _writes_to_operand(node: fx.Node, body: fx.Graph) -> bool:
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    given = {
        storage_key(tensor.untyped_storage())
        for operand in body.find_nodes(op="placeholder")
        for tensor in tensors_of(operand.meta.get("val"))
    }
    written = (
        argument
        for known, argument in zip(schema_of(node.target).arguments, node.args, strict=False)
        if known.alias_info is not None and known.alias_info.is_write
    )
    tensors = (t for n in written if isinstance(n, fx.Node) for t in tensors_of(n.meta.get("val")))
    return any(storage_key(tensor.untyped_storage()) in given for tensor in tensors)


def _result_differences(loop: fx.Node, body: fx.Graph) -> Iterator[str]:
    (results,) = body.output_node().args
    parts = [part for n in results if (part := value_of(n)) is not None]  # type: ignore
    returned = list(tensors_of(loop.meta.get("val")))
    specs: Any = loop.args[4]
    if not len(parts) == len(specs) == len(returned):
        yield f"its body returns {len(parts)} values of {len(specs)}"
        return
    for (kind, _, dtype), part, result in zip(specs, parts, returned, strict=True):
        shapes = [list(hint_shape(value)) for value in (part, result)]
        dim = stacked_dim(kind)
        if dim is not None:
            shapes[0][dim] = shapes[1][dim]
        if shapes[0] != shapes[1]:
            yield f"its body returns {tuple(part.shape)} for a result {tuple(result.shape)}"
        is_summand = dim is None and torch.promote_types(part.dtype, dtype) == part.dtype
        if dtype != result.dtype or not (part.dtype == dtype or is_summand):
            yield f"its body returns {part.dtype} for a result of {result.dtype}"


# ---- facts ---------------------------------------------------------------------------------------
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Fault:
    """A node of which a fact does not hold, and why."""

    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} {self.reason}"


# Something that may hold of a graph: of which nodes of the second one it does not; the first is the
# graph before the pass.
Fact = Callable[[JointGraph, JointGraph], Iterator[Fault]]


def exact_values(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    """Recorded values are those of the ops."""
    # A copy under another name has the recorded value itself.
    original = {id(node.meta["val"]): node for node in before.nodes if "val" in node.meta}
    for node in after.nodes:
        old = before.by_name.get(node.name) or original.get(id(node.meta.get("val")))
        if old is not None and (node is old or signature(node) == signature(old)):
            continue
        found = difference(node)
        if found and (old is None or difference(old) != found):
            yield Fault(node.name, found)


def same_results(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    """Results have the layouts that were traced."""
    (recorded,), (results,) = before.output.args, after.output.args
    assert isinstance(recorded, tuple | list), "the recorded results are a list"
    assert isinstance(results, tuple | list), "the results are a list"
    if len(recorded) != len(results):
        yield Fault("output", f"has {len(results)} results in place of {len(recorded)}")
        return
    for old, new in zip(recorded, results, strict=True):
        if not isinstance(old, fx.Node) or not isinstance(new, fx.Node):
            if old is not new and (isinstance(old, fx.Node) or isinstance(new, fx.Node)):
                yield Fault("output", f"has {new} in place of {old}")
            continue
        traced, value = value_of(old), value_of(new)
        # What is no copy, such as an expanded value, may become one.
        if traced is not None and value is not None and order_of_copy(traced) is not None:
            if found := layout_difference(traced, value):
                yield Fault(new.name, f"is a result of the step: {found}")


def phases(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    """No node of the forward depends on a tangent."""
    known = {  # a copy has the recorded value itself; by their names alone nodes may be mistaken
        (node.name, id(node.meta["val"]))
        for node in before.nodes
        if "val" in node.meta and node not in before.backward
    }
    late = {node.name for node in before.forward_outputs if node in before.backward}
    for node in after.forward_outputs:
        if node in after.backward and node.name not in late:
            yield Fault(node.name, "is a result of the forward, but depends on a tangent")
    for node in after.nodes:
        if node in after.backward and (node.name, id(node.meta.get("val"))) in known:
            yield Fault(node.name, "belongs to the forward, but depends on a tangent")


def order(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    """Nothing is read before it is written, nor behind the write that replaces it."""
    for node in after.nodes:
        late = [n for n in node.all_input_nodes if after.index.get(n, -1) >= after.index[node]]
        if late:
            yield Fault(node.name, f"reads {late[0].name} before it is written")
    changed = dict(_readers_behind_writes(before))
    for name, written in _readers_behind_writes(after):
        if changed.get(name) != written:
            yield Fault(name, f"reads {written} after it was overwritten")


def _readers_behind_writes(joint: JointGraph) -> Iterator[tuple[str, str]]:
    """Nodes that read an input behind the write that replaces it, and the input."""
    for write in joint.nodes:
        if write.target is not aten.copy_.default:
            continue
        written = write.args[0]
        assert isinstance(written, fx.Node), "what is written is a node"
        for reader in _readers(written):
            behind = joint.index[reader] > joint.index[write]
            if behind and reader.op != "output" and reader.target is not BEFORE_WRITE:
                yield reader.name, written.name


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    reached = walk(node.users, lambda user: user.users if ops.shares_storage(user) else ())
    return (reader for reader in reached if not ops.shares_storage(reader))


def pure_loops(before: JointGraph, after: JointGraph) -> Iterator[Fault]:
    """Bodies of loops are pure, and return what the loop says."""
    for node in after.nodes:
        if node.target is not mst_loop:
            continue
        old = before.by_name.get(node.name)
        if old is not None and signature(old) == signature(node):
            continue
        body = getattr(after.module, str(node.args[0].target))  # type: ignore[union-attr]
        for found in body_differences(node, body.graph):
            yield Fault(node.name, found)


ALWAYS = (exact_values, same_results, phases, order, pure_loops)  # of a joint graph
FINISHED = (exact_values, order, pure_loops)  # of a forward or a backward graph
