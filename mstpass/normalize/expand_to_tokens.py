"""Expand an operand that has one row per sequence to one row per token.

An advantage ``[B, 1]`` times a ratio ``[B, S]`` is broadcast over some of the token dims only, so a
chunk of the flattened tokens cannot slice it. Expanded to ``[B, S]``, which is a view and copies
nothing, it can be sliced like the other operands. So can the factors of a rotary embedding,
``[S, d]`` times the queries of several sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import ROWS, heads_dim, is_attention, is_attention_item, is_backward
from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import JointGraph, tensors_of, value_of
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import Size, generic_shape
from mstpass.graph.token_rules.arguments import argument, shape_of
from mstpass.graph.tokens import Refusal, Spec, broadcast_source
from mstpass.normalize.token_window import downstream

aten = torch.ops.aten


def expand_to_tokens(joint: JointGraph) -> Rewritten:
    """Expand such operands of pointwise ops downstream of an anchor, in a copy of the graph.

    Returns:
        The copy and the names of the ops that read the expanded operands; the graph itself if it
        has no such operand.
    """
    specs = {node: spec for node, (spec, _) in joint.cached(downstream).items()}
    return _expanded(joint, specs)


def expand_to_rows(joint: JointGraph) -> Rewritten:
    """The same of what attention's queries and keys are made from, and of their gradients."""
    return _expanded(joint, _rows_of_attention(joint))


def _expanded(joint: JointGraph, specs: Mapping[fx.Node, Spec]) -> Rewritten:
    partly_broadcast = _partly_broadcast(specs)
    if not partly_broadcast:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    by_name, sizes = rewriting.joint.by_name, rewriting.sizes
    for user_name, operand_name, spec in partly_broadcast:
        user, operand = by_name[user_name], by_name[operand_name]
        result = next(tensors_of(user.meta["val"]))  # all results of a pointwise op have one shape
        shape = _expanded_shape(result.shape, operand.meta["val"].shape, spec)
        with rewriting.graph.inserting_before(user), contextlib.suppress(UnknownSize):
            written = sizes.arguments(shape)
            expanded = rewriting.builder.call(aten.expand.default, operand, written)
            expanded.meta.update(policy_meta(user))
            rewriting.replace(operand, expanded, [user])
    return rewriting.finished(), frozenset(user for user, _, _ in partly_broadcast)


def _partly_broadcast(specs: Mapping[fx.Node, Spec]) -> list[tuple[str, str, Spec]]:
    """Triples: the name of the pointwise op, that of the operand, the spec of the op's result."""
    return [
        (node.name, operand.name, spec)
        for node, spec in specs.items()
        if ops.is_pointwise(node)
        for operand in _partly_broadcast_operands(node, spec)
    ]


def _partly_broadcast_operands(node: fx.Node, spec: Spec) -> list[fx.Node]:
    shape = shape_of(node)
    return [
        operand
        for operand in node.all_input_nodes
        if (value := value_of(operand)) is not None
        and isinstance(broadcast_source(generic_shape(value), shape, spec), Refusal)
    ]


def _expanded_shape(result: torch.Size, operand: torch.Size, spec: Spec) -> list[Size]:
    """The operand's shape with the token dims of the result."""
    aligned = [1] * (len(result) - len(operand)) + list(operand)
    return [result[dim] if dim in spec else size for dim, size in enumerate(aligned)]


def _rows_of_attention(joint: JointGraph) -> dict[fx.Node, Spec]:
    """The token dims of what queries, keys and values of several sequences are made from, back to
    the products, and of what is made from their gradients."""
    found: dict[fx.Node, Spec] = {}
    for node in reversed(joint.nodes):
        if is_attention(node) and heads_dim(node) == 1 and shape_of(node)[0] != 1:
            tensors = (argument(node, name) for name in ("query", "key", "value"))
            found.update((n, (0, ROWS)) for n in tensors if n.op == "call_function")
        elif node in found and not ops.is_matmul(node):
            found.update(_operand_rows(node, found[node]))
    for node in joint.nodes:
        if is_attention_item(node) and is_backward(node.all_input_nodes[0]):
            if shape_of(node)[0] != 1:
                found[node] = (0, ROWS)
        elif source := next((n for n in node.all_input_nodes if n in found), None):
            result = ops.result_spec(node, source, found[source])
            if node in joint.backward and isinstance(result, tuple) and not ops.is_matmul(node):
                found[node] = result
    return found


def _operand_rows(node: fx.Node, spec: Spec) -> dict[fx.Node, Spec]:
    if ops.is_pointwise(node):
        shape = shape_of(node)
        alike = (n for n in node.all_input_nodes if value_of(n) is not None)
        return {n: spec for n in alike if shape_of(n) == shape and n.op == "call_function"}
    needs = ops.operand_specs(node, spec)
    if isinstance(needs, Refusal):
        return {}
    return {n: held for n, held in needs.items() if held and n.op == "call_function"}
