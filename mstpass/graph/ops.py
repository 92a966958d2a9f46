"""What the passes know about ops: one row an op. An op without a row is a barrier.

A row (``Op``) answers four questions:
    forward:  given the spec of one operand, what is the result: a spec, SUM, or a Refusal?
    backward: given the spec of the result, what must each operand's spec be?
    linear:   is the result linear (and homogeneous) in these operands?
    shape_arg: which argument holds sizes that must be rewritten for a chunk?

Pointwise ops are those that PyTorch tags so (``torch.Tag.pointwise``) and that draw no random
numbers; every other op needs a row of its own. The rules themselves are in rules.py and linear.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import rules
from mstpass.graph.joint import value_of
from mstpass.graph.linear import (
    VIEWS,
    Linear,
    all_terms,
    first_only,
    is_zero,
    linear_in,
    linear_matmul,
    linear_scatter,
    linear_view,
    never,
)
from mstpass.graph.rules import Backward, Forward, matmul_factors, shape_of, sum_operands
from mstpass.graph.tokens import Refusal, Spec, Sum, without_ones

__all__ = [
    "TABLE",
    "Op",
    "is_cheap_view",
    "is_constant",
    "is_matmul",
    "is_pointwise",
    "is_view",
    "is_zero",
    "lookup",
    "matmul_factors",
    "operand_specs",
    "result_spec",
    "sum_operands",
]

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str  # "pointwise" | "view" | "reduce" | "matmul" | "index" | "create"
    forward: Forward
    backward: Backward
    linear: Linear
    shape_arg: int | None = None


def lookup(node: fx.Node) -> Op | Refusal:
    """The node's row, or why it has none."""
    if node.op != "call_function":
        return Refusal(f"{node.op} {node.name}")
    row = TABLE.get(node.target)
    if row is not None:
        return row
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags:
            return Refusal(f"{target} draws random numbers")
        if target._schema.is_mutable:
            return Refusal(f"{target} writes to its operands")
        if torch.Tag.pointwise in target.tags:
            return Op(
                "pointwise", rules.pointwise_forward, rules.pointwise_backward, linear_in(target)
            )
    return Refusal(f"no token rule for {target}")


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in VIEWS


def is_cheap_view(node: fx.Node) -> bool:
    """A view that a loop's body can redo for free; an item of a tuple is not one."""
    return is_view(node) and node.target is not operator.getitem


def is_constant(node: fx.Node) -> bool:
    """Made from no tensor: ``full``, ``iota``, ..."""
    row = TABLE.get(node.target) if node.op == "call_function" else None
    return row is not None and row.kind == "create" and not node.all_input_nodes


def is_pointwise(node: fx.Node) -> bool:
    row = lookup(node)
    return isinstance(row, Op) and row.kind == "pointwise"


def is_matmul(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in rules.MATMULS


def _rows() -> dict[Any, Op]:
    view = Op("view", rules.view_forward, rules.view_backward, linear_view, shape_arg=1)
    squeezed = dataclasses.replace(view, shape_arg=None)
    permute = Op("view", rules.permute_forward, rules.permute_backward, linear_view)
    expand = Op("view", rules.expand_forward, rules.pointwise_backward, linear_view, shape_arg=1)
    total = Op("reduce", rules.reduce_forward(sums=True), rules.reduce_backward, linear_view)
    mean = Op("reduce", rules.reduce_forward(sums=False), rules.reduce_backward, linear_view)
    reduce = dataclasses.replace(mean, linear=never)
    matmul = Op("matmul", rules.matmul_forward, rules.matmul_backward, linear_matmul)
    created = Op("create", rules.created_forward, rules.created_backward, never, shape_arg=0)
    like = dataclasses.replace(created, shape_arg=None)
    constant = Op("create", rules.created_forward, rules.constant_backward, never)
    pointwise = Op("pointwise", rules.pointwise_forward, rules.pointwise_backward, first_only)

    def along(position: int, linear: Linear) -> Op:
        return Op("index", rules.along_forward(position), rules.along_backward(position), linear)

    table: dict[Any, Op] = {
        operator.getitem: Op("view", rules.getitem_forward, rules.getitem_backward, linear_view),
        aten.embedding.default: Op(
            "index", rules.embedding_forward, rules.embedding_backward, never
        ),
        aten.select.int: Op("view", rules.select_forward, rules.select_backward, linear_view),
        aten.slice.Tensor: dataclasses.replace(along(1, linear_view), kind="view"),
        aten.slice_scatter.default: along(2, linear_scatter),
        aten.cat.default: along(1, all_terms),
        aten.split.Tensor: dataclasses.replace(along(2, linear_view), kind="view"),
        aten.split_with_sizes.default: dataclasses.replace(along(2, linear_view), kind="view"),
        aten.gather.default: along(1, first_only),
        aten.scatter.value: along(1, linear_scatter),
        aten.scatter.src: along(1, linear_scatter),
        aten.scatter_add.default: along(1, linear_scatter),
        aten._softmax.default: along(1, never),
        aten._log_softmax.default: along(1, never),
        aten.cumsum.default: along(1, first_only),
        aten.constant_pad_nd.default: Op("index", rules.pad_forward, rules.pad_backward, never),
        aten.clone.default: pointwise,
        aten.copy.default: dataclasses.replace(pointwise, linear=never),
        prims.convert_element_type.default: pointwise,
    }
    table |= dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default), view
    )
    table |= dict.fromkeys(
        (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
        squeezed,
    )
    table |= dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), permute)
    table |= {aten.expand.default: expand}
    table |= dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), total)
    table |= {aten.mean.dim: mean}
    table |= dict.fromkeys(
        (
            aten.amax.default,
            aten.amin.default,
            aten.var_mean.correction,
            aten.var.correction,
            aten.logsumexp.default,
            aten.argmax.default,
            aten.argmin.default,
            aten.any.dim,
            aten.prod.dim_int,
            aten.max.dim,
        ),
        reduce,
    )
    table |= dict.fromkeys(rules.MATMULS, matmul)
    table |= dict.fromkeys((aten.scalar_tensor.default, prims.iota.default), constant)
    table |= dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), created)
    table |= dict.fromkeys(
        (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default), like
    )
    return table


TABLE: Mapping[Any, Op] = _rows()


def result_spec(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
    """The node's spec given that one of its operands has ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    result = row.forward(node, operand, spec)
    if isinstance(result, tuple):
        return without_ones(shape_of(node), result)
    return result


def operand_specs(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec] | Refusal:
    """What a node needs of its operands to have ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    if any(value_of(n) is None and not n.meta.get("val") for n in node.all_input_nodes):
        return Refusal(f"{node.name} has an operand without a tensor value")
    needs = row.backward(node, spec)
    if isinstance(needs, Refusal):
        return needs
    return {n: without_ones(shape_of(n), s) for n, s in needs.items()}
