"""A cheap value that two products' values read along different dims is computed once for each.

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
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.row_sums import rewritten_row_sum
from mstpass.graph.tokens import WHOLE, Refusal, Spec
from mstpass.normalize.token_window import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR

aten = torch.ops.aten

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
    found = [node.name for node in joint.nodes if _is_over_tokens(joint, node, needs, least)]
    if not found:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    made = set[str]()
    for name in found:
        node = rewriting.joint.by_name[name]
        with rewriting.graph.inserting_before(node):
            total = rewritten_row_sum(rewriting.builder, node.target, node.args, node.kwargs)
        if total is not None:
            rewriting.replace(node, total)
            made.add(total.name)
    return rewriting.finished() if made else joint, frozenset(made)


def _is_over_tokens(joint: JointGraph, node: fx.Node, needs: _Needs, least: int) -> bool:
    if node.target is not aten.sum.dim_IntList or node not in joint.backward:
        return False
    (operand, *_) = node.all_input_nodes
    value = value_of(operand)
    if value is None or operand not in needs or numel(operand) < least:
        return False
    return any(value.dim() - 1 in spec for spec in needs[operand])
