"""Questions about the op of a node, answered by the op table.

``lookup`` gives the row of an op; ``result_spec`` and ``operand_specs`` apply its token rules; the
``is_...`` functions say to which group the op of a node belongs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mstpass.graph import advice
from mstpass.graph.joint import numel, tensors_of, value_of
from mstpass.graph.op_rows.row import Attention, Row
from mstpass.graph.op_table import may_draw, row_of
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules import OperandSpecs, Rule
from mstpass.graph.token_rules.arguments import shape_of, tensor_inputs
from mstpass.graph.token_rules.products import bias_and_factors
from mstpass.graph.token_rules.views import ThroughView
from mstpass.graph.tokens import Reduced, Refusal, Spec, without_ones
from mstpass.problem.op import SCATTER
from mstpass.torch_internals.graphs import OpOverload, is_opaque, schema_of
from mstpass.walk import walk

aten = torch.ops.aten

_NO_OP = Row("other")  # placeholders and the like


class NoRule(Refusal):
    """The op table does not know the op: a gap of the table, not a property of the op."""


def row(node: fx.Node) -> Row:
    """The row of the node's op, whether it has token rules or not."""
    return row_of(node.target) if node.op == "call_function" else _NO_OP


def lookup(node: fx.Node) -> Row | Refusal:
    """The row of the node's op, or the reason why it has no token rules."""
    if node.op != "call_function":
        return Refusal(f"{node.name} is a {node.op}, not an op")
    return with_token_rules(node.target)


@functools.cache
def with_token_rules(target: Any) -> Row | Refusal:
    """The row of an op, or the reason why it has no token rules."""
    found = row_of(target)
    if found.has_token_rules:
        return found
    if found.mixes:
        return Refusal(advice.Reason(f"{target}: {found.mixes}", advice.fix_of(found.mixes)))
    if may_draw(target):
        return Refusal(advice.NO_DROPOUT(f"{target} draws random numbers"))
    if isinstance(target, OpOverload) and schema_of(target).is_mutable:
        return Refusal(advice.NO_WRITES(f"{target} writes to its operands"))
    of_torch = getattr(target, "namespace", "") in ("aten", "prims")
    fix = advice.NARROW_OR_OTHER_OP if of_torch else advice.IN_ATEN
    return NoRule(fix(f"no token rule for {target}"))


# ---- token rules -------------------------------------------------------------------------------
def _rule_of(node: fx.Node) -> Rule | ThroughView | Refusal:
    found = lookup(node)
    if isinstance(found, Refusal):
        return found
    assert found.rule is not None, "the row has token rules"
    return found.rule


def result_spec(node: fx.Node, operand: fx.Node, spec: Spec) -> Spec | Reduced | Refusal:
    """The spec of the node's result if one of its operands has ``spec``."""
    rule = _rule_of(node)
    result = rule if isinstance(rule, Refusal) else rule.forward(node, operand, spec)
    return without_ones(shape_of(node), result) if isinstance(result, tuple) else result


def operand_specs(node: fx.Node, spec: Spec) -> OperandSpecs | Refusal:
    """The specs that the node's operands must have for its result to have ``spec``."""
    rule = _rule_of(node)
    if isinstance(rule, Refusal):
        return rule
    if not all(value_of(n) is not None or _can_be_operand(n) for n in node.all_input_nodes):
        return Refusal(advice.SEPARATE_DIMS(f"an operand of {node.name} is not a tensor"))
    needs = rule.backward(node, spec)
    if isinstance(needs, Refusal):
        return needs
    return {n: without_ones(shape_of(n), s) for n, s in needs.items()}


def _can_be_operand(node: fx.Node) -> bool:
    """Whether a loop can hand on the value; a symbolic float or bool, for example, it cannot."""
    has_tensor = any(True for _ in tensors_of(node.meta.get("val")))
    return has_tensor or is_size(node) or is_opaque(node)


def sum_operands(node: fx.Node, operand: fx.Node, spec: Spec) -> OperandSpecs:
    """The specs of the operands of a node that sums over the tokens of ``operand``."""
    rule = row(node).rule
    assert isinstance(rule, Rule), "the op sums over tokens"
    return {n: without_ones(shape_of(n), s) for n, s in rule.sums(node, operand, spec).items()}


def size_operands(node: fx.Node) -> list[fx.Node]:
    """The symbolic sizes that a node computes with; those in its ``shape_arg`` do not count."""
    shape_arg = row(node).shape_arg
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
    return row(node).kind == "pointwise"


def is_reduction(node: fx.Node) -> bool:
    return row(node).kind == "reduce"


def is_constant(node: fx.Node) -> bool:
    """Whether the op makes its result from no tensor: ``full``, ``iota``, ..."""
    return row(node).kind == "create" and not tensor_inputs(node)


def is_padded(node: fx.Node) -> bool:
    """Whether the value is another one among zeros, as a slice's gradient is."""
    return row(node).pads


def is_copy(node: fx.Node) -> bool:
    """Whether the value has the elements of the operand, perhaps in another dtype."""
    return row(node).copies


def is_scatter(node: fx.Node) -> bool:
    """Whether the op writes elements at given places of a copy of its first operand."""
    return row(node).memory_kind == SCATTER


def attention_of(node: fx.Node) -> Attention | None:
    """What is known of a fused attention op whose heads a loop can divide; None of all others."""
    attention = row(node).attention
    return attention if attention is not None and attention.results else None


# ---- matmuls -----------------------------------------------------------------------------------
def is_matmul(node: fx.Node) -> bool:
    return row(node).kind == "matmul"


def matmul_factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The left and the right matrix of a mm, addmm, bmm or baddbmm node."""
    return bias_and_factors(node)[1:]


def gathers_rows(node: fx.Node) -> bool:
    """Whether each row of the result is a row of a table that has no more elements."""
    if node.target not in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return False
    table = node.args[0]
    assert isinstance(table, fx.Node), "the table is a node"
    indices = [i for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
    return len(indices) == 1 and node.args[1][0] is indices[0] and numel(table) <= numel(node)  # type: ignore[index]


def is_grouped_matmul(node: fx.Node) -> bool:
    """Whether the op multiplies rows that are grouped by expert, each group by its own weights."""
    factors = row(node).factors
    return factors is not None and factors.grouped


def is_batched_matmul(node: fx.Node) -> bool:
    """Whether the op multiplies batches of matrices: bmm, baddbmm."""
    factors = row(node).factors
    return is_matmul(node) and factors is not None and factors.batched


def is_weight(node: fx.Node) -> bool:
    """Whether the node is an input of the step, perhaps viewed, cast or copied."""
    return behind(node, lambda one: is_view(one) or is_copy(one)).op == "placeholder"


# ---- views and storages ------------------------------------------------------------------------
def is_view(node: fx.Node) -> bool:
    return row(node).kind == "view"


def is_reshape(node: fx.Node) -> bool:
    """Whether the node is a view that keeps all elements in order: by a shape, or (un)squeeze."""
    return isinstance(row(node).rule, ThroughView)


def is_view_by_shape(node: fx.Node) -> bool:
    """Whether the node is a view by a shape that it is given: view, reshape, _unsafe_view."""
    return is_reshape(node) and row(node).shape_arg is not None


def is_cheap_view(node: fx.Node) -> bool:
    """Whether the node is a view that costs nothing to repeat; an item of a tuple is not one."""
    return is_view(node) and node.target is not operator.getitem


def widens(node: fx.Node) -> bool:
    """Whether the node casts a value to a dtype of more bytes."""
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    sizes = [n.meta["val"].element_size() for n in (node, node.all_input_nodes[0])]
    return bool(sizes[0] > sizes[1])


def readers_through_views(node: fx.Node) -> list[fx.Node]:
    """The users of the node, with views replaced by their own users."""
    reached = walk(node.users, lambda user: user.users if is_cheap_view(user) else ())
    return [reader for reader in reached if not is_cheap_view(reader)]


def shares_storage(node: fx.Node) -> bool:
    """Whether the value has no storage of its own: it is a view, or an item of ``unbind``."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage the value shares; the node itself if it has its own."""
    return behind(node, shares_storage)


def behind(node: fx.Node, shows: Callable[[fx.Node], bool]) -> fx.Node:
    """What nodes that show, or wait for, their first operand lead to; any other node itself."""
    while shows(node):
        node = node.all_input_nodes[0]
    return node
