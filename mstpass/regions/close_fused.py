"""Close a region as fused: its forward and its backward become one loop, which runs in the forward.

That is correct if everything that the backward nodes need from outside is linear in one scalar s,
and the backward nodes are linear in what they need. Then

    backward(s) = s * backward(1)

so the loop computes with 1 in the place of s, and its gradients are multiplied by s later.
The loss of an LM head is of this kind: s is the tangent of the loss, or a scalar computed from it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, ancestors, numel, value_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake
from mstpass.regions.absorb import (
    absorb_sums,
    absorb_users,
    check_linear,
)
from mstpass.regions.anchors import anchor_spec
from mstpass.regions.grow import COMPLETE
from mstpass.regions.wide_growth import WideGrowth

# The most widening matmuls in a row in one fused loop. The time to compile the loop's body grows
# with their square: for MLPs with dropout 28 s for 4 of them, 134 s for 6 (2 busy CPU cores,
# 2026-11-21).
_MOST_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True)
class Unit:
    """What the backward of a fused region is linear in.

    Attributes:
        scalar: the scalar; the loop computes with 1 in its place.
        prelude: the nodes between the scalar and the region. They run before the loop, also with 1
            in the place of the scalar.
    """

    scalar: fx.Node
    prelude: tuple[fx.Node, ...]


def close_fused(joint: JointGraph, growth: WideGrowth) -> tuple[Unit | None, str]:
    """Close the region as fused.

    Returns:
        The unit, or None and the reason why the region cannot be fused. In that case the members of
        ``growth`` are of no use: the caller keeps a copy.
    """
    trial = growth.copy()
    if not any(n in joint.backward for n in trial.specs):
        return None, "the region has no backward part"
    try:
        unit = _close(joint, trial)
        growth.adopt(trial)
        absorb_users(joint, growth, {n for n, s in growth.specs.items() if s != WHOLE})
        absorb_sums(joint, growth)
        # of a weight that is used twice, the loop has one sum: dw = dw_1 + dw_2
        of_weights = filter(ops.is_matmul, joint.backward.intersection(growth.specs))
        growth.join_sums({node for node in of_weights if growth.specs[node] == SUM})
        _check_matmuls_in_a_row(joint, growth)
    except CannotTake as refusal:
        return None, f"not fused: {refusal.node.name}: {refusal.reason}"
    return unit, ""


def _close(joint: JointGraph, growth: WideGrowth) -> Unit:
    """Add members until no path leaves the region and comes back."""
    while True:
        entries = _pull_backward(joint, growth)
        size = len(growth.specs)
        scalar = entries[0] if len(entries) == 1 and numel(entries[0]) == 1 else None
        part = {n for n, s in growth.specs.items() if s != WHOLE or n in joint.backward}
        growth.close(part, ignored=scalar)
        if len(growth.specs) == size:
            break
    for node, reduced in growth.waits_for_reductions():
        if reduced in joint.backward:
            raise CannotTake(node, f"{COMPLETE}, and the backward is a part of one loop")
    unit = _unit(joint, growth, entries)
    check_linear([n for n in joint.sorted(growth.specs) if n in joint.backward], joint.backward)
    return unit


def _pull_backward(joint: JointGraph, growth: WideGrowth) -> list[fx.Node]:
    """Add the backward values with tokens that members read; return the others that they read.

    The latter enter the region. They must not depend on its results, for they are computed before
    the loop.
    """
    matmuls = growth.wide_matmuls()
    entries: dict[fx.Node, None] = {}
    seen = 0
    while seen < len(growth.specs):
        new = list(growth.specs)[seen:]  # members are kept in the order in which they joined
        seen = len(growth.specs)
        for member in new:
            for operand, spec in growth.required_specs(member).items():
                if operand in growth.specs or operand not in joint.backward:
                    continue
                if numel(operand) == 1 or operand.op == "placeholder":
                    entries[operand] = None
                elif growth.depends_on(operand, matmuls):
                    growth.add(operand, spec)
                elif growth.try_add(operand, spec):
                    matmuls = growth.wide_matmuls()
                else:
                    entries[operand] = None
    return [entry for entry in entries if entry not in growth.specs]


def _unit(joint: JointGraph, growth: WideGrowth, entries: list[fx.Node]) -> Unit:
    """The scalar in which all entries are linear: the tangent itself if that is possible.

    With the tangent as the unit, the loop computes exactly what the graph without a loop computes
    for a tangent of 1. Otherwise a single scalar that depends on the region's own results, which
    exist only after the loop, is the unit.

    Raises:
        CannotTake: there is no such scalar.
    """
    if not entries:
        raise CannotTake(next(iter(growth.specs)), "no gradient enters the region")
    for node in growth.specs:
        value = value_of(node)
        if value is not None and value.dtype == torch.float16 and node in joint.backward:
            # The loss scale arrives with the tangent; without it small gradients underflow.
            raise CannotTake(
                node, "float16 gradients need the loss scale, which is known only in the backward"
            )
    matmuls = growth.wide_matmuls()
    before = joint.sorted(n for n in ancestors(entries) if n in joint.backward)
    needs_results = next((n for n in before if growth.depends_on(n, matmuls)), None)
    if needs_results is not None:
        if len(entries) == 1 and numel(entries[0]) == 1:
            return Unit(entries[0], ())
        raise CannotTake(
            needs_results, "a gradient that enters the region depends on the region's results"
        )
    tangents = [n for n in before if n.op == "placeholder"]
    if len(tangents) != 1:
        raise CannotTake(entries[-1], "several gradients enter the region")
    if numel(tangents[0]) != 1:
        raise CannotTake(tangents[0], "the gradient that enters the region is not a scalar")
    prelude = [n for n in before if n is not tangents[0]]
    check_linear(prelude, joint.backward)
    return Unit(tangents[0], tuple(prelude))


def _check_matmuls_in_a_row(joint: JointGraph, growth: WideGrowth) -> None:
    """Raise ``CannotTake`` if one loop would run too many widening matmuls in a row."""
    in_a_row: dict[fx.Node, int] = {}
    for node in joint.sorted(growth.specs):
        if node in joint.backward:
            continue
        widens = ops.is_matmul(node) and anchor_spec(node) is not None
        before = max((in_a_row.get(n, 0) for n in node.all_input_nodes), default=0)
        in_a_row[node] = widens + before
        if in_a_row[node] > _MOST_IN_A_ROW:
            raise CannotTake(
                node,
                f"more than {_MOST_IN_A_ROW} widening matmuls in a row, which compile slowly as "
                "one loop",
            )
