"""Questions about the op of a node, answered by the op table.

``lookup`` gives the row of an op; ``result_spec`` and ``operand_specs`` apply its token rules; the
``is_...`` functions say to which group the op of a node belongs.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import numel, tensors_of, value_of
from mstpass.graph.linearity import linear_in
from mstpass.graph.op_table import (
    GROUPED_BY_EXPERT,
    NOT_TOKEN_PARALLEL,
    TABLE,
    Op,
    pointwise_row,
)
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import shape_of, tensor_inputs
from mstpass.graph.token_rules.grouped_matmul import GROUPED
from mstpass.graph.token_rules.indexing import PUTS, put_sum_specs
from mstpass.graph.token_rules.matmul import MATMULS, bias_and_factors, contracted_specs
from mstpass.graph.token_rules.views import VIEWS
from mstpass.graph.tokens import Refusal, Spec, Sum, without_ones
from mstpass.torch_internals.graphs import OpOverload, is_opaque, schema_of

aten = torch.ops.aten
prims = torch.ops.prims

_COPIES = frozenset({prims.convert_element_type.default, aten.clone.default})
_SCATTERS = PUTS | {aten.scatter.src, aten.scatter.value, aten.scatter_add.default}
_PADDED = frozenset(
    {aten.constant_pad_nd.default, aten.select_scatter.default, aten.slice_scatter.default}
)


class NoRule(Refusal):
    """The op table does not know the op: a gap of the table, not a property of the op."""


def lookup(node: fx.Node) -> Op | Refusal:
    """The row of the node's op, or the reason why it has none."""
    if node.op != "call_function":
        return Refusal(f"{node.name} is a {node.op}, not an op")
    return row_of(node.target)


@functools.cache
def row_of(target: Any) -> Op | Refusal:
    """The row of an op, or the reason why it has none.

    An op without a row in the table is pointwise if PyTorch tags it so. Ops that draw random
    numbers or write to their operands are refused whatever their tags say.
    """
    row = TABLE.get(target)
    if row is not None:
        return row
    if isinstance(target, OpOverload):
        if schema_of(target).name in NOT_TOKEN_PARALLEL:
            return Refusal(f"{target}: {NOT_TOKEN_PARALLEL[schema_of(target).name]}")
        if torch.Tag.nondeterministic_seeded in target.tags:
            return Refusal(f"{target} draws random numbers")
        if schema_of(target).is_mutable:
            return Refusal(f"{target} writes to its operands")
        if torch.Tag.pointwise in target.tags:
            return pointwise_row(linear_in(target))
    return NoRule(f"no token rule for {target}")


# ---- token rules -------------------------------------------------------------------------------
def result_spec(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Sum | Refusal:
    """The spec of the node's result if one of its operands has ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    result = row.forward(node, operand, spec)
    if isinstance(result, tuple):
        return without_ones(shape_of(node), result)
    return result


def operand_specs(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """The specs that the node's operands must have for its result to have ``spec``."""
    row = lookup(node)
    if isinstance(row, Refusal):
        return row
    if not all(value_of(n) is not None or _can_be_operand(n) for n in node.all_input_nodes):
        return Refusal(f"an operand of {node.name} is not a tensor")
    needs = row.backward(node, spec)
    if isinstance(needs, Refusal):
        return needs
    return {n: without_ones(shape_of(n), s) for n, s in needs.items()}


def _can_be_operand(node: fx.Node) -> bool:
    """Whether a loop can hand on the value; a symbolic float or bool, for example, it cannot."""
    has_tensor = any(True for _ in tensors_of(node.meta.get("val")))
    return has_tensor or is_size(node) or is_opaque(node)


def sum_operands(node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
    """The specs of the operands of a node that sums over the tokens of ``operand``."""
    if node.target in PUTS:
        return put_sum_specs(node)
    return contracted_specs(node) if node.target in MATMULS else {operand: spec}


def size_operands(node: fx.Node) -> list[fx.Node]:
    """The symbolic sizes that a node computes with; those in its ``shape_arg`` do not count."""
    row = lookup(node)
    shape_arg = row.shape_arg if isinstance(row, Op) else None
    found: dict[fx.Node, None] = {}
    values = [a for i, a in enumerate(node.args) if i != shape_arg]
    fx.map_arg((values, node.kwargs), lambda n: found.setdefault(n) if is_size(n) else None)
    return list(found)


# ---- names and groups --------------------------------------------------------------------------
def op_name(node: fx.Node) -> str:
    """The full name of the op, such as ``aten.mm.default``; empty for placeholders and the like."""
    return _name(node.target) if node.op == "call_function" else ""


_name = functools.cache(str)  # an OpOverload builds its name anew at every call


def is_pointwise(node: fx.Node) -> bool:
    row = lookup(node)
    return isinstance(row, Op) and row.kind == "pointwise"


def is_reduction(node: fx.Node) -> bool:
    row = lookup(node)
    return isinstance(row, Op) and row.kind == "reduce"


def is_constant(node: fx.Node) -> bool:
    """Whether the op makes its result from no tensor: ``full``, ``iota``, ..."""
    row = TABLE.get(node.target) if node.op == "call_function" else None
    return row is not None and row.kind == "create" and not tensor_inputs(node)


def is_padded(node: fx.Node) -> bool:
    """Whether the value is another one among zeros, as a slice's gradient is."""
    return node.op == "call_function" and node.target in _PADDED


def is_scatter(node: fx.Node) -> bool:
    """Whether the op writes elements at given places of a copy of its first operand."""
    return node.op == "call_function" and node.target in _SCATTERS


# ---- matmuls -----------------------------------------------------------------------------------
def is_matmul(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in MATMULS


def matmul_factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The left and the right matrix of a mm, addmm, bmm or baddbmm node."""
    return bias_and_factors(node)[1:]


def gathers_rows(node: fx.Node) -> bool:
    """Whether each row of the result is a row of a table that has no more elements."""
    if node.target not in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return False
    table = node.args[0]
    assert isinstance(table, fx.Node)
    indices = [i for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
    return len(indices) == 1 and node.args[1][0] is indices[0] and numel(table) <= numel(node)  # type: ignore[index]


def is_grouped_matmul(node: fx.Node) -> bool:
    """Whether the op multiplies rows that are grouped by expert, each group by its own weights."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    by_expert = NOT_TOKEN_PARALLEL.get(schema_of(node.target).name) == GROUPED_BY_EXPERT
    return by_expert or node.target in GROUPED


def is_weight(node: fx.Node) -> bool:
    """Whether the node is an input of the step, perhaps viewed, cast or copied."""
    while is_view(node) or node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


# ---- views and storages ------------------------------------------------------------------------
def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in VIEWS


def is_cheap_view(node: fx.Node) -> bool:
    """Whether the node is a view that costs nothing to repeat; an item of a tuple is not one."""
    return is_view(node) and node.target is not operator.getitem


def readers_through_views(node: fx.Node) -> list[fx.Node]:
    """The users of the node, with views replaced by their own users."""
    found: list[fx.Node] = []
    for user in node.users:
        found.extend(readers_through_views(user) if is_cheap_view(user) else [user])
    return found


def shares_storage(node: fx.Node) -> bool:
    """Whether the value has no storage of its own: it is a view, or an item of ``unbind``."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage the value shares; the node itself if it has its own."""
    while shares_storage(node):
        node = node.all_input_nodes[0]
    return node
