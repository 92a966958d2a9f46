"""What adds up several of a loop's sums, so that the loop can return one of them."""

from __future__ import annotations

import heapq
from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.sizes import is_size
from mstpass.graph.token_rules.arguments import tensor_inputs


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
    return same_phase and alone and _is_sum_of_sums(node, sums)


def _is_sum_of_sums(node: fx.Node, sums: set[fx.Node]) -> bool:
    """Whether a node adds sums, or only views or casts one.

    Such a node can be applied to the parts of each chunk, and the results added up.
    """
    read = set(tensor_inputs(node))
    value = value_of(node)
    if value is None or not read <= sums:
        return False
    narrows = any(value.itemsize < value_of(n).itemsize for n in read)  # type: ignore[union-attr]
    return not narrows and ops.row(node).is_linear(node, read)
