"""Describe the partition of a joint graph as a ``CutProblem``: plain data that solvers read.

Each placeholder and each call of the joint graph becomes a ``Value``. The nodes that depend on a
tangent are the problem's backward, all others its forward values.
"""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from mstpass.graph import ops
from mstpass.graph.checkpoint_policies import Policies, policies_of
from mstpass.graph.collectives import is_pending
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.node_cost import time_us
from mstpass.graph.recompute_rules import is_heavy, is_pinned
from mstpass.graph.sizes import is_size
from mstpass.memory.simulate_graph import op_of
from mstpass.problem.problem import (
    MUST_SAVE,
    RECOMPUTED,
    CutProblem,
    RegionModes,
    Value,
    with_needs,
)
from mstpass.torch_internals.opaque_values import is_opaque


def cut_problem(
    joint: JointGraph, regions: tuple[RegionModes, ...] = (), scatters_delayed: bool = False
) -> CutProblem:
    """The partition problem of one joint graph.

    Args:
        regions: the modes in which each region can run.
        scatters_delayed: as in ``memory.simulate_graph.simulate_step``.
    """
    nodes = [n for n in joint.nodes if n.op in ("placeholder", "call_function")]
    names, policies = {n.name for n in nodes}, policies_of(joint)
    forward, backward = (
        tuple(
            _value(joint, n, names, policies, scatters_delayed)
            for n in nodes
            if (n in joint.backward) == in_backward
        )
        for in_backward in (False, True)
    )
    gradients = tuple(n.name for n in joint.backward_outputs)
    return CutProblem(
        with_needs(forward, backward, gradients),
        backward=backward,
        outputs=tuple(n.name for n in joint.forward_outputs),
        gradients=gradients,
        regions=regions,
    )


def _value(
    joint: JointGraph, node: fx.Node, names: Set[str], policies: Policies, scatters_delayed: bool
) -> Value:
    op = op_of(node, scatters_delayed=scatters_delayed)
    free = (node.op == "placeholder" and node not in joint.backward) or (
        is_size(node) or is_opaque(node)
    )
    tag = "" if is_opaque(node) else policies.tags.get(node, "")
    return Value(
        name=node.name,
        bytes=op.bytes if value_of(node) is not None else 0,
        inputs=tuple(name for name in op.inputs if name in names),
        kind=op.kind,
        inner_bytes=op.inner_bytes,
        dear=op.dear,
        own_loops=op.own_loops,
        on_cpu=op.on_cpu,
        us=time_us(joint, node),
        free=free,
        heavy=is_heavy(node) or node in policies.boundary,
        pinned=tag == MUST_SAVE or (is_pinned(node) and tag not in RECOMPUTED),
        savable=tag not in RECOMPUTED
        and value_of(node) is not None
        and not ops.shares_storage(node)
        and not is_pending(node),
        forward=node in joint.forward,
        tag=tag,
    )
