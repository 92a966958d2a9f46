"""Write reconstructions into a joint graph: backward reads new nodes in place of dropped values.

A reconstructed value is a new node, and so is each value that backward recomputes from one. The
forward, and the originals, keep reading the original nodes; the backward and the new nodes read new
ones where they exist. Each new node reads nodes written before it, so the graph has no cycle. The
check of saved sets (problem/saved_set.py) then holds for the new graph as for any other: a new node
is a forward value that may be recomputed.

With *encodings* a saved value crosses in fewer bytes, and nothing is lost.

    narrow  A float32 value that was cast from bfloat16 (or float16) crosses in that type: all its
            elements are numbers of it.
    bits    A bool tensor [..., D] crosses as uint8 [..., D / 8]. The last dim is cut into eight
            parts, and part k becomes bit k, so that reads and writes are contiguous.

Both are exact for every value, also for infinities and NaN (but for the payload of a NaN).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder, UnknownSize
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.loop_op import mst_loop, stacked_dim
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.renew_values import CannotRenew
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.sizes import same_shape
from mstpass.partition.reconstruct.choose_drops import Decision, Step
from mstpass.partition.reconstruct.rules import CAST, RULES, Inverse, aten, dtype_of, shape_of
from mstpass.plans import Reconstructed
from mstpass.walk import needed_first, walk_once

NARROW, BITS = "narrow", "bits"
_LOW_DTYPES = (torch.bfloat16, torch.float16)
_BITS_PER_BYTE = 8


def encoding_of(node: fx.Node) -> str:
    """The name of the encoding that fits the value; empty if none does."""
    if dtype_of(node) == torch.float32 and low_dtype(node) is not None:
        return NARROW
    value = value_of(node)
    if value is None or value.dtype != torch.bool or value.dim() == 0:
        return ""
    last = value.shape[-1]
    fills_bytes = isinstance(last, int) and last > 0 and last % _BITS_PER_BYTE == 0
    return BITS if fills_bytes else ""


def encoded_bytes(encoding: str, size: int) -> int:
    """Bytes that cross in place of ``size`` bytes."""
    return size // _BITS_PER_BYTE if encoding == BITS else size // 2


def low_dtype(node: fx.Node) -> torch.dtype | None:
    """The 16-bit dtype that holds all elements of a float32 value exactly; None if not certain."""
    while ops.is_cheap_view(node) or node.target is aten.clone.default:
        node = node.all_input_nodes[0]
    if node.target is CAST:
        before = dtype_of(node.all_input_nodes[0])
        return before if before in _LOW_DTYPES else None
    if node.target is operator.getitem:
        return _low_dtype_of_loop_result(node)
    return None


def _low_dtype_of_loop_result(node: fx.Node) -> torch.dtype | None:
    """For a result that a loop stacks from chunks: the 16-bit dtype of what its body returns."""
    loop, position = node.args[:2]
    if not isinstance(loop, fx.Node) or loop.target is not mst_loop:
        return None
    body: Any = loop.args[0]
    specs: Any = loop.args[4]
    if stacked_dim(specs[position][0]) is None:
        return None
    module: fx.GraphModule = getattr(node.graph.owning_module, str(body.target))
    results: Any = module.graph.output_node().args[0]
    return low_dtype(results[position])


def encode(builder: Builder, node: fx.Node, value: fx.Node, encoding: str) -> fx.Node:
    """Encode ``value``, the new graph's version of ``node``."""
    if encoding == NARROW:
        return builder.call(CAST, value, low_dtype(node))
    *outer, last = shape_of(builder, value)
    assert isinstance(last, int), "the last dim is a number"
    shape = [*outer, _BITS_PER_BYTE, last // _BITS_PER_BYTE]
    parts = builder.call(aten.reshape.default, value, shape)
    packed: fx.Node | None = None
    for k in range(_BITS_PER_BYTE):
        part = builder.call(aten.select.int, parts, -2, k)
        part = builder.call(CAST, part, torch.uint8)
        part = builder.call(aten.mul.Tensor, part, 1 << k)
        packed = part if packed is None else builder.call(aten.bitwise_or.Tensor, packed, part)
    assert packed is not None, "the packed value is known"
    return packed


def decode(builder: Builder, node: fx.Node, packed: fx.Node, encoding: str) -> fx.Node:
    """Compute ``node`` from what ``encode`` returned."""
    if encoding == NARROW:
        return builder.call(CAST, packed, dtype_of(node))
    value = value_of(packed)
    assert value is not None, "the op gives one tensor"
    numbers = builder.call(
        torch.ops.prims.iota.default,
        _BITS_PER_BYTE,
        start=0,
        step=1,
        dtype=torch.uint8,
        device=value.device,
        requires_grad=False,
    )
    ones = builder.filled([_BITS_PER_BYTE], 1, value)
    bits = builder.call(aten.bitwise_left_shift.Tensor, ones, numbers)
    column = builder.call(aten.unsqueeze.default, bits, 1)
    rows = builder.call(aten.unsqueeze.default, packed, -2)
    parts = builder.call(aten.bitwise_and.Tensor, rows, column)
    mask = builder.call(aten.ne.Scalar, parts, 0)
    return builder.call(aten.reshape.default, mask, shape_of(builder, node))


_COPIED_META = ("seq_nr", "stack_trace", "nn_module_stack")


class CannotWrite(Exception):
    """A decision that cannot be written into the graph; the message says why."""


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The new joint graph, in which all nodes have the names that they had.

    Attributes:
        saved: names of its nodes to save.
        read: the new nodes that backward reads in the place of others, by the names of these.
        done: what was done to which value, for the report.
    """

    joint: JointGraph
    saved: frozenset[str]
    read: Mapping[str, str]
    done: tuple[Reconstructed, ...] = ()


def rewrite(
    joint: JointGraph, decision: Decision, encodings: Mapping[str, str], named: Container[str]
) -> Rewritten:
    """The new joint graph.

    Args:
        encodings: the encoding of each saved value that crosses in fewer bytes, by name.
        named: the nodes that the decision knows. Others only prepare operands of one of these.

    Raises:
        CannotWrite: a symbolic size that no node of the graph holds, an operand that would have
            another layout than a loop's body expects, or a value whose recorded type is not that
            of its op.
    """
    writing = _Writing(Rewriting(joint), dict(decision.steps), encodings, named)
    try:
        return writing.run(decision.saved)
    except (UnknownSize, CannotRenew) as error:
        raise CannotWrite(str(error)) from error


class _Writing:
    """Writes what the backward of one copy of a joint graph reads."""

    def __init__(
        self,
        rewriting: Rewriting,
        steps: Mapping[str, Step],
        encodings: Mapping[str, str],
        named: Container[str],
    ):
        self.rewriting, self.joint = rewriting, rewriting.joint
        self.encodings, self.named = encodings, named
        self.builder = rewriting.builder
        self.builder.name = "mst_again"
        self.encoded: dict[fx.Node, fx.Node] = {}
        self.in_backward: dict[fx.Node, fx.Node] = {}  # where backward reads a new node
        self.steps = self._changed_steps(steps)

    def _changed_steps(self, steps: Mapping[str, Step]) -> dict[fx.Node, Step]:
        """The steps that are inverses, or that read a reconstructed or encoded value."""
        changed: dict[fx.Node, Step] = {}
        for name, step in steps.items():
            node = self.joint.by_name[name]
            if step is not None or self._reads_new(node, changed):
                changed[node] = step
        others = [n for n in self.joint.nodes if self._is_unnamed(n)]
        changed.update((node, None) for node in others if self._reads_new(node, changed))
        return changed

    def _is_unnamed(self, node: fx.Node) -> bool:
        is_call = node.op == "call_function" and node not in self.joint.backward
        return is_call and node.name not in self.named

    def _reads_new(self, node: fx.Node, changed: Container[fx.Node]) -> bool:
        further = lambda n: n.all_input_nodes if self._is_unnamed(n) else ()
        read = walk_once(node.all_input_nodes, further)
        return any(n in changed or n.name in self.encodings for n in read)

    def run(self, saved: frozenset[str]) -> Rewritten:
        joint, graph = self.joint, self.rewriting.graph
        for name, encoding in self.encodings.items():
            node = joint.by_name[name]
            with graph.inserting_before(node.next):  # the values it is made from may be freed
                self.encoded[node] = encode(self.builder, node, node, encoding)
        count = joint.num_fwd_outputs
        results: Any = joint.output.args[0]
        with graph.inserting_before(joint.output):  # in the end, each comes before its readers
            for node in joint.nodes:
                for operand in node.all_input_nodes if node in joint.backward else ():
                    if (new := self._read(operand)) is not operand:
                        node.replace_input_with(operand, new)
            gradients = fx.map_arg(tuple(results[count:]), self._read)
        joint.output.args = ((*results[:count], *gradients),)
        names = {self._saved_node(joint.by_name[name]).name for name in saved}
        read = {old.name: new.name for old, new in self.in_backward.items()}
        return Rewritten(self.rewriting.finished(reorder=True), frozenset(names), read)

    def _saved_node(self, node: fx.Node) -> fx.Node:
        """The node to save for a saved value: encoded, if backward decodes it."""
        return self.encoded[node] if node in self.encoded and node in self.in_backward else node

    def _read(self, node: fx.Node) -> fx.Node:
        """The node that backward reads for another; written when first read."""
        for one in needed_first(node, self._written_for, self.in_backward):
            if self._is_encoded(one):
                encoding = self.encodings[one.name]
                self.in_backward[one] = decode(self.builder, one, self.encoded[one], encoding)
            elif one in self.steps:
                self.in_backward[one] = self._write(one, self.steps[one])
                self._check(one)
            else:
                break
            self.rewriting.renewal.replaced(one, self.in_backward[one])
        return self._known(node)

    def _known(self, node: fx.Node) -> fx.Node:
        return self.in_backward.get(node, node)

    def _is_encoded(self, node: fx.Node) -> bool:
        return node.name in self.encodings and node not in self.joint.backward

    def _written_for(self, node: fx.Node) -> list[fx.Node]:
        """What is written before a value is, as it is computed from that."""
        if node not in self.steps or self._is_encoded(node):
            return []
        step, operands = self.steps[node], node.all_input_nodes
        if isinstance(step, Inverse):
            operands = [self.joint.by_name[name] for name in step.sources]
        return [n for n in operands if n in self.steps or self._is_encoded(n)]

    def _write(self, node: fx.Node, step: Step) -> fx.Node:
        """Compute a value anew: by an inverse, or by its own op from what backward reads."""
        if isinstance(step, Inverse):
            op = self.joint.by_name[step.op]
            return RULES[step.rule].write(self.builder, op, node, self._known)
        operands = {n: self._known(n) for n in node.all_input_nodes}
        if any(n.op == "get_attr" for n in operands):
            return self._write_loop(node, operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        # A reconstructed operand may have another layout than the original: a view may need a copy.
        target = aten.reshape.default if node.target is aten.view.default else node.target
        built = self.builder.call(target, *args, **kwargs)
        built.meta.update({key: node.meta[key] for key in _COPIED_META if key in node.meta})
        built.meta.update(policy_meta(node))  # only a policy lets backward sort again, for example
        return built

    def _write_loop(self, node: fx.Node, operands: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A loop once more; its body was traced for operands of the original strides."""
        for old, new in operands.items():
            before, after = value_of(old), value_of(new)
            if before is not None and after is not None and before.stride() != after.stride():
                raise CannotWrite(
                    f"{node.name} reads {old.name}, whose reconstruction has other strides"
                )
        return self.builder.copy(node, operands.__getitem__)

    def _check(self, node: fx.Node) -> None:
        old, new = value_of(node), value_of(self.in_backward[node])
        if old is None or new is None:
            return
        if self.steps[node] is None and old.dtype != new.dtype:  # torch's passes leave such nodes
            raise CannotWrite(
                f"{node.name} is recorded as {old.dtype}, but its op gives {new.dtype}"
            )
        assert old.dtype == new.dtype and same_shape(old.shape, new.shape), (
            f"{node.name}: {new.dtype} {tuple(new.shape)} for {old.dtype} {tuple(old.shape)}"
        )
