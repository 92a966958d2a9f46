"""Close a region as fused: its forward and backward as one loop in the forward.

Legal when all that its backward nodes need from outside is linear in one scalar. By linearity,
backward(s) = s * backward(1): the loop runs with 1, and its gradients are scaled afterwards.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from mstpass.graph.joint import JointGraph, ancestors, numel, value_of
from mstpass.graph.tokens import WHOLE, CannotTake
from mstpass.regions.absorb import absorb, absorb_sums, check_linear
from mstpass.regions.grow import Growth


@dataclasses.dataclass(frozen=True)
class Unit:
    """What a fused region's backward is linear in: a scalar, and the nodes from it to the region.

    The loop runs with 1 in the scalar's place; so do the nodes of ``prelude``, before the loop.
    """

    scalar: fx.Node
    prelude: tuple[fx.Node, ...]


def try_fused(joint: JointGraph, growth: Growth) -> tuple[Unit | None, str]:
    """Close the region as fused. Returns what its backward is linear in, or None and why not."""
    trial = growth.copy()
    if not any(n in joint.backward for n in trial.specs):
        return None, "no backward part"
    try:
        while True:
            entries = _close_backward(joint, trial)
            size = len(trial.specs)
            cut = entries[0] if len(entries) == 1 and numel(entries[0]) == 1 else None
            part = {n for n, s in trial.specs.items() if s != WHOLE or n in joint.backward}
            trial.close(part, cut=cut)
            if len(trial.specs) == size:
                break
        unit = _unit(joint, trial, entries)
        check_linear([n for n in joint.sorted(trial.specs) if n in joint.backward], joint.backward)
    except CannotTake as refusal:
        return None, f"not fused: {refusal.node.name}: {refusal.reason}"
    growth.take(trial)
    absorb(joint, growth, {n for n, s in growth.specs.items() if s != WHOLE})
    absorb_sums(joint, growth)
    return unit, ""


def _close_backward(joint: JointGraph, growth: Growth) -> list[fx.Node]:
    """Pull in the backward values that carry tokens; return those that enter from outside.

    A value that does not depend on the region's results may enter: it is computed before the loop.
    """
    products = growth.products()
    entries: dict[fx.Node, None] = {}
    seen = 0
    while seen < len(growth.specs):
        new = list(growth.specs)[seen:]  # members keep the order in which they came
        seen = len(growth.specs)
        for member in new:
            for operand, spec in growth.needs(member).items():
                if operand in growth.specs or operand not in joint.backward:
                    continue
                if numel(operand) == 1 or operand.op == "placeholder":
                    entries[operand] = None
                elif growth.feeds(products, operand):
                    growth.add(operand, spec)
                elif growth.could_add(operand, spec):
                    products = growth.products()
                else:
                    entries[operand] = None
    return [entry for entry in entries if entry not in growth.specs]


def _unit(joint: JointGraph, growth: Growth, entries: list[fx.Node]) -> Unit:
    """The scalar that all entries are linear in: the tangent itself wherever that is possible.

    With the tangent as the unit, the loop computes just what the unchunked graph computes for a
    tangent of 1. A single scalar that depends on the region's own results, which exist only after
    the loop, is a unit of its own.
    """
    if not entries:
        raise CannotTake(next(iter(growth.specs)), "no gradient enters")
    for node in growth.specs:
        value = value_of(node)
        if value is not None and value.dtype == torch.float16 and node in joint.backward:
            # A loss scale arrives with the tangent: without it small gradients underflow.
            raise CannotTake(node, "float16 gradients need the loss scale, which comes later")
    products = growth.products()
    cone = joint.sorted(n for n in ancestors(entries) if n in joint.backward)
    needs_results = next((n for n in cone if growth.feeds(products, n)), None)
    if needs_results is not None:
        if len(entries) == 1 and numel(entries[0]) == 1:
            return Unit(entries[0], ())
        raise CannotTake(needs_results, "a gradient that enters needs the region's own results")
    tangents = [n for n in cone if n.op == "placeholder"]
    if len(tangents) != 1:
        raise CannotTake(entries[-1], "several gradients enter")
    if numel(tangents[0]) != 1:
        raise CannotTake(tangents[0], "the gradient that enters is no scalar")
    prelude = [n for n in cone if n is not tangents[0]]
    check_linear(prelude, joint.backward)
    return Unit(tangents[0], tuple(prelude))
