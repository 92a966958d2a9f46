"""Operands in the forms in which a loop over tokens can slice them.

``expand_to_tokens``: one row per sequence becomes one row per token. An advantage ``[B, 1]`` times
a ratio ``[B, S]`` is broadcast over some of the token dims only, so a chunk of the flattened tokens
cannot slice it. Expanded to ``[B, S]``, which is a view and copies nothing, it can be sliced like
the other operands. So can the factors of a rotary embedding, ``[S, d]`` times the queries of
several sequences.

``values_by_axis``: a cheap value that two products read along different dims is computed for each.

In a contrastive loss over ``logits`` and ``logits.T``, the labels of rows and of columns are the
same, and so is the one-hot gradient ``g`` of both::

    row loss:     g[i, j] - softmax(logits)[i, j]       a chunk has rows i of g
    column loss:  g[j, i] - softmax(logits.T)[j, i]     a chunk has columns i of g

A loop holds each value in one way. So the value is written twice, with all that it is made of: ops
that are cheap, on values of which none comes from a product. What the step's inputs and the forward
give narrow stays one value, which a loop may read in both ways.

A sum of such a value over the tokens needs no loop either (graph/row_sums.py): for the one-hot
gradient it is the gradient of the label's element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import ROWS, heads_dim, is_attention, is_attention_item, is_backward
from mstpass.graph.joint import JointGraph, numel, tensors_of, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten
from mstpass.graph.row_sums import rewritten_row_sum
from mstpass.graph.sizes import Size
from mstpass.graph.token_rules.arguments import argument, shape_of
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.normalize.partial import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR

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
    of_name = {node.name: spec for node, spec in specs.items() if ops.is_pointwise(node)}
    pointwise = (node for node in joint.nodes if node.name in of_name)
    found = (node for node in pointwise if _partly_broadcast_operands(node, specs[node]))

    def expand(rewriting: Rewriting, node: fx.Node) -> None:
        spec = of_name[node.name]
        result = next(tensors_of(node.meta["val"]))  # all results of a pointwise op have one shape
        for operand in _partly_broadcast_operands(node, spec):
            shape = _expanded_shape(result.shape, operand.meta["val"].shape, spec)
            written = rewriting.sizes.arguments(shape)
            expanded = rewriting.builder.call(aten.expand.default, operand, written)
            rewriting.replace(operand, expanded, [node])

    return rewritten(joint, found, expand)


def _partly_broadcast_operands(node: fx.Node, spec: Spec) -> list[fx.Node]:
    """The operands that have some of the token dims of a node, and are broadcast over others."""
    from_right, found = [dim - len(shape_of(node)) for dim in spec], []
    for operand in node.all_input_nodes:
        shape = () if value_of(operand) is None else shape_of(operand)
        held = [dim for dim in from_right if len(shape) + dim >= 0 and shape[dim] != 1]
        if 0 < len(held) < len(spec):
            found.append(operand)
    return found


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


_Reader = tuple[fx.Node, Spec]  # a node in the token dims that it has for one of its own readers
_Needs = dict[fx.Node, dict[Spec, list[_Reader]]]


def values_by_axis(joint: JointGraph) -> Rewritten:
    """A copy of the graph with such values; the graph itself if it has none."""
    least = _least_wide(joint)
    if least is None:
        return joint, frozenset()
    joint, summed = _without_sums(joint, least)
    needs = _needs(joint)
    shared = [node.name for node in joint.nodes if _is_shared(joint, node, needs, least)]
    if not shared:
        return joint, summed
    rewriting = Rewriting(joint)
    copies = _copies(rewriting, shared)
    return rewriting.finished(), summed | copies


def _least_wide(joint: JointGraph) -> int | None:
    """From how many elements on a value is wide; None if no wide value has its tokens last."""
    known = joint.cached(downstream)
    for node, (spec, anchor) in known.items():
        value = value_of(node)
        least = int(WIDE_OF_ANCHOR * numel(anchor))
        if value is not None and value.dim() - 1 in spec and numel(node) >= least:
            return min(int(WIDE_OF_ANCHOR * numel(a)) for _, a in known.values())
    return None


def _needs(joint: JointGraph) -> _Needs:
    """Of each value that comes from no product: its readers, by the token dims that these need."""
    known = joint.cached(downstream)
    needs: _Needs = defaultdict(lambda: defaultdict(list))
    for node in reversed(joint.nodes):
        specs = [known[node][0]] if node in known else [*needs[node]] if _is_cheap(node) else []
        for spec in specs:
            required = ops.operand_specs(node, spec)
            if isinstance(required, Refusal):
                continue
            for operand, needed in required.items():
                if operand not in known:
                    needs[operand][needed].append((node, spec))
    return needs


def _is_cheap(node: fx.Node) -> bool:
    pointwise = ops.is_pointwise(node) or ops.is_cheap_view(node) or ops.is_constant(node)
    return pointwise or ops.is_reduction(node)


def _is_shared(joint: JointGraph, node: fx.Node, needs: _Needs, least: int) -> bool:
    """Whether the value has to be written once for each of several token dims."""
    if node not in needs or not _is_cheap(node):
        return False
    specs = set(needs[node])
    if any(isinstance(ops.operand_specs(node, spec), Refusal) for spec in specs):
        return False  # no loop can hold it that way, in a copy of its own as little
    if numel(node) >= least:
        specs -= {WHOLE}
    elif node not in joint.backward:
        return False
    return len(specs) > 1


def _copies(rewriting: Rewriting, shared: list[str]) -> frozenset[str]:
    """Write each of the values for all token dims but the first. Returns the new names."""
    joint = rewriting.joint
    needs, nodes = _needs(joint), {joint.by_name[name] for name in shared}
    first = {node: next(iter(needs[node])) for node in nodes}
    written: dict[_Reader, fx.Node] = {}

    def of(node: fx.Node, spec: Spec) -> fx.Node:
        return written.get((node, spec), node)

    for node in joint.sorted(nodes):
        for spec in needs[node]:
            if spec == first[node]:
                continue
            required: Any = ops.operand_specs(node, spec)  # no refusal: _is_shared
            operands = {n: of(n, required.get(n, WHOLE)) for n in node.all_input_nodes}
            with rewriting.graph.inserting_after(node):
                written[node, spec] = rewriting.graph.node_copy(node, operands.__getitem__)
    for node in nodes:
        for spec, readers in needs[node].items():
            mine = [r for r, own in readers if r not in nodes or own == first[r]]
            if (node, spec) in written and mine:
                rewriting.replace(node, written[node, spec], mine)
    return frozenset(node.name for node in written.values())


# ---- sums over tokens ----------------------------------------------------------------------------
def _without_sums(joint: JointGraph, least: int) -> Rewritten:
    """Without sums, over the last dim, of such values that have their tokens there."""
    needs = _needs(joint)
    found = (node for node in joint.nodes if _is_over_tokens(joint, node, needs, least))
    total = lambda copy, node: rewritten_row_sum(copy.builder, node.target, node.args, node.kwargs)
    return rewritten(joint, found, total)


def _is_over_tokens(joint: JointGraph, node: fx.Node, needs: _Needs, least: int) -> bool:
    if node.target is not aten.sum.dim_IntList or node not in joint.backward:
        return False
    (operand, *_) = node.all_input_nodes
    value = value_of(operand)
    if value is None or operand not in needs or numel(operand) < least:
        return False
    return any(value.dim() - 1 in spec for spec in needs[operand])
