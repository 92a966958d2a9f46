"""Add users to a region that reduce what leaves it: sums of gradients, and sums over its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.sizes import is_size
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, has_tokens
from mstpass.regions.wide_growth import WideGrowth


def absorb_users(joint: JointGraph, growth: WideGrowth, part: set[fx.Node]) -> None:
    """Add users that replace several narrow outputs of the part by one: ``dx = dx_gate + dx_up``.

    Such a user reads only members, and it is the only node outside that reads them. Of a user that
    returns a tuple, such as a split, not more than one item may be read: a loop returns no tuples.
    """
    queue = joint.sorted(part)
    for node in queue:
        if isinstance(growth.specs.get(node), Reduced) or growth.wide(node):
            continue
        outside = [u for u in joint.users(node) if u not in growth.specs]
        if len(outside) != 1:
            continue
        user = outside[0]
        if user.op == "output" or not _replaces_outputs(growth, user):
            continue
        if value_of(user) is None and len(user.users) > 1:
            continue
        result = growth.spec_of_user(user, node)
        if isinstance(result, tuple) and (user in joint.backward) == (node in joint.backward):
            growth.specs[user] = result
            queue.append(user)


def absorb_sums(joint: JointGraph, growth: WideGrowth) -> None:
    """Add narrow nodes that lead to sums over tokens, such as a loss or the gradient of a norm.

    First all narrow token-parallel users of members and their users are added on trial. Then those
    that would leave the loop token by token are removed again, until only nodes remain that end in
    sums.
    """
    trial = growth.copy()
    queue = [n for n in joint.sorted(growth.specs) if has_tokens(growth.specs[n])]
    for node in queue:
        for user in joint.users(node):
            if user in trial.specs or ops.is_matmul(user) or growth.wide(user):
                continue
            result = trial.spec_of_user(user, node)
            if isinstance(result, Refusal) or result == WHOLE:
                continue
            trial.specs[user] = result
            if _operands_fit(joint, trial, user):
                queue.append(user)
            else:
                del trial.specs[user]  # it is tried again when its last operand has joined
    added = [n for n in joint.sorted(trial.specs) if n not in growth.specs]
    while leaving := [n for n in added if n in trial.specs and _leaves(trial, n)]:
        for node in leaving:
            del trial.specs[node]
    growth.adopt(trial)


def _operands_fit(joint: JointGraph, growth: WideGrowth, node: fx.Node) -> bool:
    """Whether every operand is a member with the spec that the node needs, or a forward input."""
    is_input = lambda n, _: n.op == "placeholder" and n not in joint.backward
    is_linear = node not in joint.backward or not _not_linear(node, joint.backward)
    return is_linear and growth.has_operands(node, is_input)


def _leaves(growth: WideGrowth, node: fx.Node) -> bool:
    """Whether the loop would have to return the node's tokens, or an operand is not available."""
    if not all(n in growth.specs or n.op == "placeholder" for n in node.all_input_nodes):
        return True
    is_reduced = isinstance(growth.specs[node], Reduced)
    return not is_reduced and any(user not in growth.specs for user in node.users)


def _replaces_outputs(growth: WideGrowth, user: fx.Node) -> bool:
    """Whether all operands are members with tokens, and no other node outside reads them."""
    return all(
        operand in growth.specs
        and has_tokens(growth.specs[operand])
        and all(u is user or u in growth.specs for u in operand.users)
        for operand in user.all_input_nodes
        if not is_size(operand)
    )


def check_linear(nodes: Iterable[fx.Node], backward: Set[fx.Node]) -> None:
    """Check that each node is linear in its backward operands.

    Raises:
        CannotTake: a node is not, or its op is unknown.
    """
    for node in nodes:
        if reason := _not_linear(node, backward):
            raise CannotTake(node, reason)


def _not_linear(node: fx.Node, backward: Set[fx.Node]) -> str:
    """Why a node is not linear in its backward operands; empty if it is."""
    row = ops.lookup(node)
    if isinstance(row, Refusal):
        return row.reason
    is_linear = row.is_linear(node, {n for n in node.all_input_nodes if n in backward})
    return "" if is_linear else f"{node.target} is not linear in the gradient"
