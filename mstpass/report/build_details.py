"""``Details`` of a planned graph: its nodes by name, place and fate, and its memory over time.

The memory timelines speak of more than the joint graph's nodes: a loop goes by ``"loop:"`` and the
first node that it returns, as in the partition problem. What a plan adds, such as a mask packed
into bits, has a name of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import fx

from mstpass.graph import op_table
from mstpass.graph.copies import original_of
from mstpass.graph.joint import JointGraph, Modules, nbytes, tensors_of
from mstpass.graph.recomputable import shares_storage
from mstpass.graph.sizes import hint_numel, hint_shape, is_size
from mstpass.graph.source import Place, Places
from mstpass.memory.timeline import StepMemory, Timeline
from mstpass.pipeline import Result
from mstpass.plans import FUSED
from mstpass.report.details import (
    BACKWARD,
    FORWARD,
    RECOMPUTED,
    RECONSTRUCTED,
    SAVED,
    Details,
    DrawnNode,
    Life,
    MemoryTimeline,
)
from mstpass.torch_internals.op_types import OpOverload


def details_of(result: Result) -> Details | None:
    """Of a finished run of the pipeline; None of one that stopped before there were two graphs."""
    if result.read is None or result.applied is None or result.modules is None:
        return None
    names = result.applied.old_names()
    for node in result.modules[1].graph.nodes:
        original = original_of(node.name)
        if original != node.name:
            names[node.name] = names.get(original, original)
    return Details(
        nodes=drawn_nodes(result, result.read, names, result.modules),
        before=memory_timeline(result.before, {}) if result.before else None,
        after=memory_timeline(result.after, names) if result.after else None,
    )


# ---- nodes -------------------------------------------------------------------------------------
def drawn_nodes(
    result: Result, joint: JointGraph, names: Mapping[str, str], modules: Modules
) -> tuple[DrawnNode, ...]:
    """All nodes but the output, in the graph's order."""
    region_of: dict[str, int] = {}
    for number, region in enumerate(result.outcome.regions):
        for name, _ in region.members:
            region_of.setdefault(name, number)
    fates = _fates(result, joint, names, modules)
    places = Places(joint)
    return tuple(
        _drawn(
            node,
            BACKWARD if node in joint.backward else FORWARD,
            places[node],
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
        op=_op(node),
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


def _op(node: fx.Node) -> str:
    """``mm`` of ``aten.mm.default``."""
    if node.op == "placeholder":
        return "input"
    target = node.target
    if isinstance(target, OpOverload):
        return target.overloadpacket.__name__
    return str(target) if isinstance(target, str) else getattr(target, "__name__", str(target))


def _fates(
    result: Result, joint: JointGraph, names: Mapping[str, str], modules: Modules
) -> dict[str, str]:
    """How backward has what it uses of the forward. Views have none: they hold no bytes."""
    plan = result.outcome.save_plan
    saved = {value.value for value in plan.saved} if plan else set()
    other = {names.get(r.node, r.node) for r in plan.reconstructed} if plan else set()
    fused = [region for region in result.outcome.regions if region.mode == FUSED]
    early = {name for region in fused for name, _ in region.members}
    early |= {name for region in fused for loop in region.loops for name in loop.prelude}
    again = _run_in(modules[1], names)
    for region in result.outcome.regions:
        for loop in region.loops:
            if loop.phase == BACKWARD:
                again.update(loop.members)
    fates: dict[str, str] = {}
    for node in reversed(joint.nodes):
        inputs = {operand.name for operand in node.all_input_nodes}
        if node in joint.backward and node.name not in early:
            again |= inputs if other else set()
        elif node.name in other:
            fates[node.name] = RECONSTRUCTED
        elif node.name in saved:
            fates[node.name] = SAVED
        elif node.name in again and node.op == "call_function" and node not in joint.backward:
            # What follows from reconstructed values is written anew, under other names: of such a
            # plan, backward computes all that it reads and does not get.
            again |= inputs if other else set()
            if not (shares_storage(node) or is_size(node) or op_table.is_constant(node)):
                fates[node.name] = RECOMPUTED
    return fates


def _run_in(module: fx.GraphModule, names: Mapping[str, str]) -> set[str]:
    return {names.get(n.name, n.name) for n in module.graph.nodes if n.op == "call_function"}


# ---- memory ------------------------------------------------------------------------------------
def memory_timeline(memory: StepMemory, names: Mapping[str, str]) -> MemoryTimeline:
    """Forward and backward as one; ``names``: by which nodes go instead of their own."""
    first = len(memory.forward.moments)
    moments = (*memory.forward.moments, *memory.backward.moments)
    crossing: dict[tuple[str, int], int] = {}  # start of what lives to the forward's end
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
    lives += _transients(memory.forward, 0)
    lives += _transients(memory.backward, first)
    return MemoryTimeline(
        moments=tuple(names.get(moment.node, moment.node) for moment in moments),
        bytes=tuple(moment.bytes for moment in moments),
        lives=tuple(
            dataclasses.replace(life, node=names.get(life.node, life.node))
            for life in sorted(lives, key=lambda life: (life.start, life.end))
            if life.start < life.end
        ),
        first_backward=first,
    )


def _transients(timeline: Timeline, offset: int) -> Iterable[Life]:
    for i, moment in enumerate(timeline.moments, offset):
        size = timeline.ops[moment.node].inner_bytes
        if size:
            yield Life(moment.node, size, i, i + 1, transient=True)
