"""Which results of a loop are written over one of its operands (graph/written_over.py).

In the backward of a block the loop over queries reads the gradient of the block's output, and
returns that of its input as far as it is known then; the next loop reads this, and returns the
whole one (normalize/gradients_in_parts.py). All three have the same rows, and each has one reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import numel, value_of
from mstpass.graph.sizes import same_shape
from mstpass.loops.operand_layout import is_copied
from mstpass.loops.region_facts import RegionFacts
from mstpass.plans import LoopInput, LoopOutput, LoopPlan


def with_results_over_operands(facts: RegionFacts, loops: Sequence[LoopPlan]) -> list[LoopPlan]:
    """The loops, with the operands that stacked results of the backward are written over."""
    return [
        _over(facts, loop, [other for other in loops if other is not loop])
        if loop.phase == "backward"
        else loop
        for loop in loops
    ]


def _over(facts: RegionFacts, loop: LoopPlan, others: Sequence[LoopPlan]) -> LoopPlan:
    read_by_others = {item.node for other in others for item in other.inputs}
    free = [
        item
        for item in loop.inputs
        if item.spec and item.node not in read_by_others and _is_read_inside(facts, item)
    ]
    outputs: list[LoopOutput] = []
    for output in loop.outputs:
        operand = next((item for item in free if _are_alike(facts, item, output)), None)
        if operand is not None:
            free.remove(operand)
            output = dataclasses.replace(output, over=operand.node)
        outputs.append(output)
    outputs.sort(key=lambda output: bool(output.over))  # they are written last
    return dataclasses.replace(loop, outputs=tuple(outputs))


def _is_read_inside(facts: RegionFacts, item: LoopInput) -> bool:
    """Whether nothing but the region reads a value of the backward, whose rows need no copy."""
    node = facts.joint.by_name[item.node]
    base, value = ops.base_of(node), value_of(node)
    return (
        node in facts.joint.backward
        and base.op == "call_function"
        and value is not None
        and numel(base) == numel(node)
        and not is_copied(value, item.spec)
        and all(reader in facts.specs for reader in ops.readers_through_views(base))
    )


def _are_alike(facts: RegionFacts, item: LoopInput, output: LoopOutput) -> bool:
    if output.spec != item.spec:
        return False
    operand, result = (value_of(_node(facts, name)) for name in (item.node, output.node))
    assert operand is not None and result is not None, "the operand and result are known"
    return operand.dtype == result.dtype and same_shape(operand.shape, result.shape)


def _node(facts: RegionFacts, name: str) -> fx.Node:
    return facts.joint.by_name[name]
