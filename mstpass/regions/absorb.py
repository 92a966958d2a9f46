"""Take into a region what makes less leave it: gradients that add up, and sums over its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph
from mstpass.graph.sizes import is_size
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal
from mstpass.regions.grow import Growth


def absorb(joint: JointGraph, growth: Growth, part: set[fx.Node]) -> None:
    """Take users that replace several of the part's outputs by one: ``dx = dx_gate + dx_up``."""
    queue = joint.sorted(part)
    for node in queue:
        if growth.specs.get(node) == SUM or growth.wide(node):
            continue
        outside = [u for u in joint.users(node) if u not in growth.specs]
        if len(outside) != 1:
            continue
        user = outside[0]
        if user.op == "output" or not _replaces(growth, user):
            continue
        result = growth.try_user(user, node)
        if isinstance(result, tuple) and (user in joint.backward) == (node in joint.backward):
            growth.specs[user] = result
            queue.append(user)


def absorb_sums(joint: JointGraph, growth: Growth) -> None:
    """Take what ends in sums over tokens of the part's values alone: a loss, a norm's gradient."""
    trial = growth.copy()
    queue = [n for n in joint.sorted(growth.specs) if growth.specs[n] not in (WHOLE, SUM)]
    for node in queue:
        for user in joint.users(node):
            if user in trial.specs or ops.is_matmul(user) or growth.wide(user):
                continue
            result = trial.try_user(user, node)
            if isinstance(result, Refusal) or result == WHOLE:
                continue
            trial.specs[user] = result
            if _fits(joint, trial, user):
                queue.append(user)
            else:
                del trial.specs[user]  # seen again when its last operand has joined
    found = [n for n in joint.sorted(trial.specs) if n not in growth.specs]
    while leaving := [n for n in found if n in trial.specs and _leaves(trial, n)]:
        for node in leaving:
            del trial.specs[node]
    growth.take(trial)


def _fits(joint: JointGraph, growth: Growth, node: fx.Node) -> bool:
    """Whether its operands are members cut as it needs, not sums of them, or inputs of the step."""
    try:
        needs = growth.needs(node)
        check_linear([node] if node in joint.backward else [], joint.backward)
    except CannotTake:
        return False
    return all(
        growth.specs[operand] == spec
        if operand in growth.specs
        else operand.op == "placeholder" and operand not in joint.backward
        for operand, spec in needs.items()
    )


def _leaves(growth: Growth, node: fx.Node) -> bool:
    """Whether it would have to leave the loop token by token, or what it needs does not enter."""
    if not all(n in growth.specs or n.op == "placeholder" for n in node.all_input_nodes):
        return True
    return growth.specs[node] != SUM and any(user not in growth.specs for user in node.users)


def _replaces(growth: Growth, user: fx.Node) -> bool:
    """All operands are members that nothing else outside uses."""
    return all(
        operand in growth.specs
        and growth.specs[operand] not in (WHOLE, SUM)
        and all(u is user or u in growth.specs for u in operand.users)
        for operand in user.all_input_nodes
        if not is_size(operand)
    )


def check_linear(nodes: Iterable[fx.Node], backward: Set[fx.Node]) -> None:
    """Raise ``CannotTake`` unless each node is linear in its operands that need a tangent."""
    for node in nodes:
        row = ops.lookup(node)
        if isinstance(row, Refusal):
            raise CannotTake(node, row.reason)
        if not row.linear(node, {n for n in node.all_input_nodes if n in backward}):
            raise CannotTake(node, f"{node.target} is not linear in the gradient")
