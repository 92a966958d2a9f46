"""The details of a planned graph: its nodes with their places and fates, and its memory over time.

The final forward and backward have more names than the joint graph. Those of loops and of copies
to the host are explained in details.py; a value that the plan adds, such as a mask packed
into bits, has a name of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, Modules, nbytes, tensors_of
from mstpass.graph.node_meta import original_name
from mstpass.graph.sizes import hint_numel, hint_shape, is_size
from mstpass.graph.source_location import Place, place_of
from mstpass.memory.simulate_ops import StepMemory, Timeline
from mstpass.pipeline import Result
from mstpass.plans import Outcome
from mstpass.problem.names import LOOP as PREFIX
from mstpass.problem.names import value_name
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    LOOP,
    OFFLOAD,
    OFFLOADED,
    RECOMPUTED,
    RECONSTRUCTED,
    RELOAD,
    SAVED,
    Details,
    DrawnNode,
    Life,
    MemoryTimeline,
    fused_nodes,
    is_on_host,
)
from mstpass.torch_internals import host_copy_ops
from mstpass.torch_internals.graphs import OpOverload


def collect_details(result: Result) -> Details | None:
    """The details of a finished run of the pipeline; None if it stopped before the split."""
    if result.read is None or result.joint is None or result.modules is None:
        return None
    nodes = (node for module in result.modules for node in module.graph.nodes)
    joint_names = {node.name: _told(value_name(original_name(node.name))) for node in nodes}
    joint_names |= _copy_names(result.modules, joint_names)
    return Details(
        nodes=_drawn_nodes(result.outcome, result.read, joint_names, result.modules),
        before=_memory_timeline(result.before, {}) if result.before else None,
        after=_memory_timeline(result.after, joint_names) if result.after else None,
    )


def _told(name: str) -> str:
    return LOOP + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name


# ---- nodes -------------------------------------------------------------------------------------
def _drawn_nodes(
    outcome: Outcome, joint: JointGraph, joint_names: Mapping[str, str], modules: Modules
) -> tuple[DrawnNode, ...]:
    """All nodes but the output, in the graph's order.

    Args:
        joint_names: nodes of the final graphs -> the nodes of the joint graph that they are.
    """
    region_of: dict[str, int] = {}
    for number, region in enumerate(outcome.regions):
        for name, _ in region.members:
            region_of.setdefault(name, number)
    fates = _fates(outcome, joint, joint_names, modules)
    return tuple(
        _drawn(
            node,
            BACKWARD if node in joint.backward else FORWARD,
            place_of(node),
            fates.get(node.name, ""),
            region_of.get(node.name, -1),
        )
        for node in joint.nodes
        if node.op != "output"
    )


def _drawn(node: fx.Node, phase: str, place: Place, fate: str, region: int) -> DrawnNode:
    tensors = list(tensors_of(node.meta.get("val")))
    largest = max(tensors, key=hint_numel, default=None)
    return DrawnNode(
        name=node.name,
        op=_op_name(node),
        phase=phase,
        module=place.module,
        source=place.line,
        shape=tuple(hint_shape(largest)) if largest is not None else (),
        dtype=str(largest.dtype).removeprefix("torch.") if largest is not None else "",
        bytes=nbytes(node),
        inputs=tuple(n.name for n in node.all_input_nodes),
        fate=fate,
        region=region,
    )


def _op_name(node: fx.Node) -> str:
    """``mm`` for ``aten.mm.default``."""
    if node.op == "placeholder":
        return "input"
    target = node.target
    if isinstance(target, OpOverload):
        return target.overloadpacket.__name__
    return str(target) if isinstance(target, str) else getattr(target, "__name__", str(target))


def _fates(
    outcome: Outcome, joint: JointGraph, joint_names: Mapping[str, str], modules: Modules
) -> dict[str, str]:
    """How backward gets each forward value that it uses. Views have no fate: they hold no bytes."""
    plan = outcome.save_plan
    saved = {value.value for value in plan.saved} if plan else set()
    reconstructed = {value_name(r.node) for r in plan.reconstructed} if plan else set()
    in_forward = fused_nodes(outcome)
    recomputed = _nodes_run_by(modules[1], joint_names)
    for region in outcome.regions:
        for loop in region.loops:
            if loop.phase == BACKWARD:
                recomputed.update(loop.members)
    fates: dict[str, str] = {}
    for node in reversed(joint.nodes):
        # Values that depend on reconstructed ones have new names in backward. If the plan
        # reconstructs, a value counts as recomputed if backward reads it without it being saved.
        read = {operand.name for operand in node.all_input_nodes} if reconstructed else set()
        if node in joint.backward and node.name not in in_forward:
            recomputed |= read
        elif node.name in reconstructed:
            fates[node.name] = RECONSTRUCTED
        elif node.name in saved:
            fates[node.name] = SAVED
        elif node.name in recomputed and node.op == "call_function" and node not in joint.backward:
            recomputed |= read
            if not (ops.shares_storage(node) or is_size(node) or ops.is_constant(node)):
                fates[node.name] = RECOMPUTED
    return fates


def _nodes_run_by(module: fx.GraphModule, joint_names: Mapping[str, str]) -> set[str]:
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return {joint_names.get(node.name, node.name) for node in calls}


def _copy_names(modules: Modules, joint_names: Mapping[str, str]) -> dict[str, str]:
    """What copies values to the host and back, and waits for copies -> its name in a timeline."""
    forward, backward = (module.graph for module in modules)
    names: dict[str, str] = {}
    value_of: dict[str, str] = {}  # what is on the host -> the value that it is a copy of
    for node in forward.nodes:
        if node.target is host_copy_ops.OFFLOAD:
            value = node.all_input_nodes[0].name
            value = joint_names.get(value, value)
            names[node.name] = OFFLOAD + value
            for wait in _waits(node):
                value_of[wait.name] = value
                names[wait.name] = OFFLOADED + value
    for node in backward.nodes:
        if node.target is host_copy_ops.RELOAD:
            on_host = node.all_input_nodes[0].name
            for copy in (node, *_waits(node)):
                names[copy.name] = RELOAD + value_of.get(on_host, on_host)
    return names


def _waits(copy: fx.Node) -> list[fx.Node]:
    return [user for user in copy.users if user.target is host_copy_ops.WAIT]


# ---- memory ------------------------------------------------------------------------------------
def _memory_timeline(memory: StepMemory, joint_names: Mapping[str, str]) -> MemoryTimeline:
    """Forward and backward as one timeline.

    A buffer that is alive at the end of forward and at the start of backward becomes one life.
    """
    first = len(memory.forward.moments)
    moments = (*memory.forward.moments, *memory.backward.moments)
    crossing: dict[tuple[str, int], int] = {}  # (node, bytes) at forward's end -> start of life
    lives: list[Life] = []
    for node, size, start, end in memory.forward.buffers():
        if end == first:
            crossing[node, size] = start
        else:
            lives.append(Life(node, size, start, end))
    for node, size, start, end in memory.backward.buffers():
        start += first
        if start == first:
            start = crossing.pop((node, size), start)
        lives.append(Life(node, size, start, first + end))
    lives += [Life(node, size, start, first) for (node, size), start in crossing.items()]
    lives += _transient_lives(memory.forward, 0)
    lives += _transient_lives(memory.backward, first)
    lives = [
        dataclasses.replace(life, node=joint_names.get(life.node, life.node))
        for life in sorted(lives, key=lambda life: (life.start, life.end))
        if life.start < life.end
    ]
    return MemoryTimeline(
        moments=tuple(joint_names.get(moment.node, moment.node) for moment in moments),
        bytes=tuple(moment.bytes for moment in moments),
        lives=tuple(life for life in lives if not is_on_host(life.node)),
        first_backward=first,
    )


def _transient_lives(timeline: Timeline, offset: int) -> Iterable[Life]:
    """The memory that ops and loops need inside, each at its one moment."""
    for i, moment in enumerate(timeline.moments, offset):
        size = timeline.ops[moment.node].inner_bytes
        if size:
            yield Life(moment.node, size, i, i + 1, transient=True)
