"""Collectives: ops in which all ranks of a process group take part.

A functional collective, such as ``_c10d_functional.all_reduce``, returns a *pending* result, which
nothing but its ``wait_tensor`` may read. The wait returns the same memory, complete::

    pending = all_reduce(x, "sum", group)
    y = wait_tensor(pending)

All ranks must run the same collectives in the same order, or they wait for each other for ever.
Ranks may have different plans: their shards may differ in size, and a budget may depend on the free
memory of a device. So nothing about collectives depends on a plan:

- A collective runs once, on whole values. It is *pinned* (graph/recompute_rules.py), so backward
  does not run it again, and it is a member of no region, so no loop runs it once for each chunk.
  Where all ranks agree, backward may repeat it (graph/repeated_collectives.py).
- Graphs with loops have their collectives in the order of the graphs without them
  (loops/apply_plans.py). torch's extraction of forward and backward keeps that order, and Inductor
  too (``decide_global_ordering_of_comms`` in torch/_inductor/comms.py).
- A collective runs in the forward or in the backward by what it depends on, as in the traced graph.

The exception is the user's ``torch.utils.checkpoint``: what it covers is recomputed, collectives
included. Which of them backward needs again may depend on the plan, so then the graphs of all ranks
must be alike, sizes included.

Sends and receives between two ranks are left to torch's partitioner.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.torch_internals.collectives import (
    ALL_TO_ALL_OF_DTENSOR,
    BETWEEN_TWO,
    NAMESPACE,
    WAITS,
)
from mstpass.torch_internals.graphs import OpOverload, schema_of


def is_collective(node: fx.Node) -> bool:
    """Whether the op exchanges data with other ranks. Waiting for the result does not count."""
    return node.op == "call_function" and _is_collective_op(node.target)


def collectives_of(joint: JointGraph) -> tuple[fx.Node, ...]:
    """The collectives of a graph, in its order."""
    return tuple(node for node in joint.nodes if is_collective(node))


def group_of(node: fx.Node) -> str:
    """The name of a collective's process group; empty if it has none."""
    name: Any = argument(node, "group_name") if has_argument(node, "group_name") else ""
    return name if isinstance(name, str) else ""


@functools.cache
def _is_collective_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    name = schema_of(target).name
    return (target.namespace == NAMESPACE and name not in WAITS) or name == ALL_TO_ALL_OF_DTENSOR


def is_wait(node: fx.Node) -> bool:
    """Whether the op waits for a collective; its result has the memory of the pending one."""
    return node.op == "call_function" and is_wait_op(node.target)


@functools.cache
def is_wait_op(target: Any) -> bool:
    return isinstance(target, OpOverload) and schema_of(target).name in WAITS


def is_pending(node: fx.Node) -> bool:
    """Whether the value is complete only after a wait, so that it must not cross to backward."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return is_collective(node) and node.target.namespace == NAMESPACE  # type: ignore[union-attr]


def is_between_two_ranks(node: fx.Node) -> bool:
    """Whether the op is a send or a receive."""
    return is_collective(node) and schema_of(node.target).name in BETWEEN_TWO  # type: ignore[arg-type]
