"""What adds up several of a loop's sums, so that the loop can return one of them."""

from __future__ import annotations

import heapq
from collections.abc import Set

from torch import fx

from mstpass.graph.heads import is_sum_of_sums
from mstpass.graph.joint import JointGraph
from mstpass.graph.sizes import is_size


def sums_of_sums(joint: JointGraph, sums: Set[fx.Node], members: Set[fx.Node]) -> list[fx.Node]:
    """The nodes that add up several sums, or views of them, in the graph's order.

    They read nothing else, and no other node outside of the loop reads what they read.

    Args:
        members: what the loop computes, the sums among them.
    """
    inside, every = set(members), set(sums)
    added: list[fx.Node] = []
    readers = [joint.index[user] for node in sums for user in node.users]
    heapq.heapify(readers)
    while readers:
        node = joint.nodes[heapq.heappop(readers)]
        read = {n for n in node.all_input_nodes if n in every}
        if node in inside or node.op == "output" or not _joins(joint, node, read, inside):
            continue
        inside.add(node)
        every.add(node)
        added.append(node)
        for user in node.users:
            heapq.heappush(readers, joint.index[user])
    for node in reversed(added):  # a view that leads to no such sum stays outside
        several = sum(not is_size(n) for n in node.all_input_nodes) > 1
        if not several and not any(user in inside for user in node.users):
            inside.remove(node)
    return [node for node in added if node in inside]


def _joins(joint: JointGraph, node: fx.Node, sums: set[fx.Node], inside: set[fx.Node]) -> bool:
    same_phase = len({n in joint.backward for n in (node, *sums)}) == 1
    alone = all(user is node or user in inside for n in sums for user in n.users)
    return same_phase and alone and is_sum_of_sums(node, sums)
