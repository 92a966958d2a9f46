"""Which values of a region's forward its backward loop reads from memory: a minimum s-t cut.

From the saved values and the region's inputs, the backward must be able to compute every forward
value that it reads, without a product other than those that it may compute again. Of all sets of
values that allow this, the cut is the one of the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention_item, is_product
from mstpass.graph.checkpoint_policies import tag_of
from mstpass.graph.joint import nbytes, value_of
from mstpass.loops.region_facts import RegionFacts
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.problem.problem import MUST_SAVE, RECOMPUTED, CutProblem, Value


def values_to_save(facts: RegionFacts, may_recompute: Set[str]) -> list[fx.Node]:
    """The values to save, in the graph's order.

    Args:
        may_recompute: names of the products that the backward may compute again. The user's
            checkpointing comes first: what it recomputes is never saved, what it saves is never
            recomputed.
    """
    forward = [node for node in facts.joint.sorted(facts.specs) if node not in facts.backward]
    names = {node.name for node in forward}
    values = [_value(facts, node, names, may_recompute) for node in forward]
    saved = min_cut(CutProblem(tuple(values)))
    return [node for node in forward if node.name in saved]


def _value(facts: RegionFacts, node: fx.Node, names: Set[str], may_recompute: Set[str]) -> Value:
    tag = tag_of(node)
    is_result = is_attention_item(node) or not ops.is_view(node)
    has_storage = is_result and value_of(node) is not None
    is_sliced = bool(facts.specs[node]) and has_storage
    return Value(
        name=node.name,
        bytes=0 if node.name in facts.region.returned else nbytes(node),
        inputs=tuple(i.name for i in node.all_input_nodes if i.name in names),
        heavy=is_product(node) and node.name not in may_recompute,
        pinned=is_sliced and tag == MUST_SAVE,
        savable=is_sliced and tag not in RECOMPUTED,
        needed=any(user in facts.backward for user in node.users),
        tag=tag if is_sliced or tag != MUST_SAVE else "",
    )
