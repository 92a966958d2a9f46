"""Which loop of a region computes what, where a loop has to end before the next one can begin.

A head whose vocabulary is sharded needs numbers of all ranks for each token, such as the maximum of
the logits. A loop does not run collectives (graph/collectives.py). A contrastive loss needs, for
each column of the logits, the maximum and the sum of all tokens' exponentials. No chunk knows them.
So the loss is several *rounds*, each a loop over all tokens::

    round 0:       logits of a chunk -> its rows' maximum and sum, its part of the columns' ones
    in between:    the maximum and the sum of all ranks; the columns' logarithms of sums
    round 1:       logits of the chunk again -> losses and gradients

A member's round is the largest number of times that a path to it from the region's products leaves
the loops: to a node outside, or because a member needs a value *complete*: one that is reduced over
all tokens, or that it reads in another way than chunk by chunk, as attention reads keys and values,
and as what is computed token by token from their gradients reads these. A sum of exponentials and
its maximum are found in one round (graph/row_sums.py).

An output that a later round or a collective waits for is returned by the loop of its own round, so
that a collective runs no later than in the graph without loops. All others are left to the last
round of their phase, which computes what they are made of in any case.

The rounds of the backward are counted anew, as they follow all of the forward. Those of a fused
region, whose backward runs in the last round of the forward, are counted on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_attention
from mstpass.graph.collectives import collectives_of, is_collective
from mstpass.graph.joint import JointGraph
from mstpass.graph.tokens import Spec
from mstpass.walk import walk_once

Members = Mapping[fx.Node, Spec | None]
Reads = Callable[[fx.Node], Mapping[fx.Node, Spec | None]]  # a member -> how it reads operands


def rounds(joint: JointGraph, members: Members, reads: Reads, fused: bool) -> dict[fx.Node, int]:
    """The round of each member, from 0 on.

    Args:
        members: with None for values that are reduced over all tokens.
        reads: operands and their specs; None where only a chunk's part of a reduction is read.
    """
    found = dict.fromkeys(members, 0)
    if not _may_have_rounds(joint, members, reads):
        return found
    inside: dict[fx.Node, int] = {}  # members that depend on a product of the region
    outside: dict[fx.Node, int] = {}  # other values that do: the round that may read them
    last = max(map(joint.index.__getitem__, found), default=-1)
    for node in joint.nodes[: last + 1]:
        in_backward = node in joint.backward
        if in_backward and node not in found and fused:
            continue
        before = []
        for n, spec in _operands(node, members, reads):
            if (n in joint.backward) != in_backward and not fused:
                continue
            if n in inside:
                is_complete = node not in found or _is_complete(members[n], spec)
                before.append(inside[n] + is_complete)
            elif n in outside:
                before.append(outside[n])
        if node in found and (before or in_backward or ops.is_matmul(node)):
            inside[node] = found[node] = max(before, default=0)
        elif node not in found and before:
            outside[node] = max(before)
    return found


def _is_complete(held: Spec | None, read: Spec | None) -> bool:
    """Whether a member is read by all chunks' results; of a reduction, a chunk's part is not."""
    return read is not None and read != held


def _operands(node: fx.Node, members: Members, reads: Reads) -> list[tuple[fx.Node, Spec | None]]:
    if node in members:
        return list(reads(node).items())
    return [(operand, ()) for operand in node.all_input_nodes]


def _may_have_rounds(joint: JointGraph, members: Members, reads: Reads) -> bool:
    """Whether a collective, or what members need complete, may come between members."""
    if joint.cached(collectives_of) or complete_operands(members, reads):
        return True
    last = max(map(joint.index.__getitem__, members), default=-1)
    backward = joint.backward
    readers = lambda node: [n for n in node.users if (n in backward) == (node in backward)]
    outside = lambda node: [n for n in readers(node) if n not in members and joint.index[n] < last]
    between = walk_once((node for node, spec in members.items() if spec is None), outside)
    return any(n in members for node in between if node not in members for n in readers(node))


def complete_operands(members: Members, reads: Reads) -> set[fx.Node]:
    """The members that other members read complete."""
    has_attention = any(map(is_attention, members))  # else what is read in two roles is no result
    candidates = {n for n, spec in members.items() if spec is None or has_attention}
    readers = {user for node in candidates for user in node.users if user in members}
    return {
        operand
        for reader in readers
        for operand, spec in reads(reader).items()
        if operand in candidates and _is_complete(members[operand], spec)
    }


def handed_on(
    numbers: Mapping[fx.Node, int], members: Members, reads: Reads, backward: Set[fx.Node]
) -> set[fx.Node]:
    """The members of the backward that a later round of it reads chunk by chunk.

    To compute them again would be to compute attention's backward again.
    """
    return {
        operand
        for node in backward
        for operand, spec in reads(node).items()
        if operand in backward and numbers[operand] < numbers[node] and spec == members[operand]
    }


def early_outputs(joint: JointGraph, members: Members, reads: Reads) -> set[fx.Node]:
    """The members whose values are needed, outside of loops, before the last round of their phase.

    Another round of the phase or a collective waits for them.
    """
    if not _may_have_rounds(joint, members, reads):
        return set()
    early = complete_operands(members, reads)
    waits: set[fx.Node] = set()  # nodes outside whose values are waited for
    for node in reversed(joint.nodes):
        in_backward = node in joint.backward
        if any(
            (user in members or user in waits or is_collective(user))
            and (user in joint.backward) == in_backward
            for user in node.users
            if node not in members or user not in members
        ):
            (early if node in members else waits).add(node)
    return early


def outputs_by_round(
    numbers: Mapping[fx.Node, int], outputs: list[fx.Node], early: Set[fx.Node]
) -> list[list[fx.Node]]:
    """The outputs of each round, without rounds that have none.

    Args:
        numbers: the rounds of the members that the loops of one phase compute.
        early: the result of ``early_outputs``.
    """
    last = max(numbers.values(), default=0)
    by_round: list[list[fx.Node]] = [[] for _ in range(last + 1)]
    for node in outputs:
        by_round[numbers[node] if node in early else last].append(node)
    return [nodes for nodes in by_round if nodes]
