"""Which forward loop of a region computes what, where collectives stand between its values.

A head whose vocabulary is sharded needs numbers of all ranks for each token, such as the maximum of
the logits. A loop does not run collectives (graph/collectives.py). So the forward of such a region
is several *rounds*, each a loop over all tokens, with the collectives between them::

    round 0:      logits of a chunk -> the chunk's maximum and sum
    collectives:  the maximum and the sum of all ranks
    round 1:      logits of the chunk again -> losses and gradients

A member's round is the largest number of collectives that stand on a path to it from the region's
products, counting those between two members. A value that leaves the region is returned by the loop
of its own round, so that a collective that reads it runs no later than in the graph without loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.collectives import collectives_of, is_collective
from mstpass.graph.joint import JointGraph


def rounds(joint: JointGraph, members: Mapping[fx.Node, object]) -> dict[fx.Node, int]:
    """The round of each member; 0 for all of them if no collective stands between them."""
    found = dict.fromkeys(members, 0)
    if not joint.cached(collectives_of):
        return found
    inside: dict[fx.Node, int] = {}  # members that depend on a product of the region
    outside: dict[fx.Node, int] = {}  # other values that do: the round that may read them
    last = max(map(joint.index.__getitem__, found), default=-1)
    for node in joint.nodes[: last + 1]:
        if node in joint.backward and node not in found:
            continue
        before = [inside[n] for n in node.all_input_nodes if n in inside]
        before += [outside[n] for n in node.all_input_nodes if n in outside]
        if node in found and (before or ops.is_matmul(node)):
            inside[node] = found[node] = max(before, default=0)
        elif node not in found and before:
            outside[node] = max(before) + is_collective(node)
    return found


def outputs_by_round(
    numbers: Mapping[fx.Node, int], outputs: list[fx.Node], backward: Set[fx.Node]
) -> tuple[list[list[fx.Node]], list[fx.Node]]:
    """The outputs of all rounds but the last; and those of the last, of the backward among them.

    Args:
        numbers: the rounds of the members that the loops compute.
        backward: the members that belong to the backward.
    """
    count = max(numbers.values(), default=0)
    earlier: list[list[fx.Node]] = [[] for _ in range(count)]
    last = []
    for node in outputs:
        if node in backward or numbers[node] == count:
            last.append(node)
        else:
            earlier[numbers[node]].append(node)
    return [nodes for nodes in earlier if nodes], last
