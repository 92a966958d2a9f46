"""The user's checkpointing: what backward must compute again, and what it must not.

``torch.utils.checkpoint`` gives each op of a checkpointed *region* a policy and the region's number
(``node.meta["recompute"]`` and ``["ac_graph_id"]``; a checkpoint without policies prefers to
recompute). They mean what they mean to torch's min-cut, but for what leaves a region::

    MUST_SAVE          never computed again; of a view, its base is not
    PREFER_SAVE        as without a policy
    PREFER_RECOMPUTE,  computed again, though it be a matmul, and not saved
    MUST_RECOMPUTE
    what leaves a region, read by another one or outside: it may be saved, and without a memory
                       budget backward does not compute it again where that takes a matmul

So to recompute a region never recomputes the one before it, and no region runs again for the sake
of its result alone. torch saves what the next region reads, but for views, and recomputes what is
read outside of regions.

Source: ``cleanup_recompute_tags`` and ``solve_min_cut`` in torch/_functorch/partitioners.py,
checked with torch 2.11, 2.13 and 2.15. Inductor draws the seeds of a whole graph in one op, which
belongs to no checkpoint. From 2.15 on (``replace_random.py``) that op has the metadata of the first
op that drew a seed, a checkpoint's policy included; it is ignored here.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Set
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mstpass.graph import op_table
from mstpass.graph.joint import JointGraph
from mstpass.graph.recomputable import base_of, is_heavy, shares_storage
from mstpass.problem.problem import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, RECOMPUTED

# the ops with which Inductor draws the seeds of all random ops of a graph
_DRAWN_FOR_ALL = ("prims.inductor_seeds.default", "prims.inductor_rand_eager_offsets.default")
META = ("recompute", "ac_graph_id")  # what a node that stands for another one must have of it
_TAGS = {
    CheckpointPolicy.MUST_SAVE: MUST_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: PREFER_RECOMPUTE,
}


@dataclasses.dataclass(frozen=True)
class Tags:
    """What binds of the user's policies in one joint graph.

    Attributes:
        of: a node's tag (problem.py); views have none.
        boundary: what leaves a region that contains slow ops before it.
    """

    of: Mapping[fx.Node, str]
    boundary: Set[fx.Node]


def tag_of(node: fx.Node) -> str:
    """The op's own policy, wherever it stands; empty where none binds."""
    if node.op != "call_function" or op_table.name_of(node) in _DRAWN_FOR_ALL:
        return ""
    policy: Any = node.meta.get("recompute")
    return _TAGS.get(policy, "")


def tags_of(joint: JointGraph) -> Tags:
    """The tags of a graph's forward."""
    given = {n: tag for n in joint.nodes if n not in joint.backward and (tag := tag_of(n))}
    if not given:
        return Tags({}, frozenset())
    slow = _slow(given)
    found = {n: tag for n, tag in given.items() if not shares_storage(n)}
    boundary: set[fx.Node] = set()
    for node, tag in given.items():
        base = base_of(node)
        if base.op != "call_function":
            continue
        if tag == MUST_SAVE or _has_hook(node, given):
            found[base] = MUST_SAVE
        elif _leaves(node, joint) and found.get(base) != MUST_SAVE:
            found.pop(base, None)
            if base in slow:
                boundary.add(base)
    for node in [n for n in found if not _recomputable(n, found)]:
        if found[node] in RECOMPUTED:
            del found[node]
    return Tags(found, boundary)


def _slow(given: Mapping[fx.Node, str]) -> set[fx.Node]:
    """What takes a slow op to compute from its region's inputs."""
    slow: set[fx.Node] = set()
    for node in given:
        before = (n for n in node.all_input_nodes if n in slow)
        if is_heavy(node) or any(_region(n) == _region(node) for n in before):
            slow.add(node)
    return slow


def _region(node: fx.Node) -> object:
    return node.meta.get("ac_graph_id")


def _leaves(node: fx.Node, joint: JointGraph) -> bool:
    """Whether the forward reads it outside of its region, or returns it."""
    return node in joint.forward_outputs or any(
        user in joint.forward and not ("recompute" in user.meta and _region(user) == _region(node))
        for user in node.users
    )


def _has_hook(node: fx.Node, given: Mapping[fx.Node, str]) -> bool:
    """A region's last value with a backward hook, as FSDP sets, which to compute it again needs."""
    within = any(given.get(user) in RECOMPUTED for user in node.users)
    return bool(node.meta.get("has_backward_hook", False)) and not within


def _recomputable(node: fx.Node, given: Mapping[fx.Node, str]) -> bool:
    """Whether its op may run again; an item is recomputed with its op, or saved with it."""
    item = node.target is operator.getitem
    return not item or given.get(node.all_input_nodes[0]) in RECOMPUTED
