"""The modes that each region could run in, as plain data for the partition problem.

A mode is a chunk plan whose loops are described by what they need and return. What one chunk needs
is simulated over the loop's body.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mstpass.chunk.body import build_body
from mstpass.chunk.choices import Choices
from mstpass.chunk.costs import costs_of
from mstpass.chunk.loop import STACK, SUM
from mstpass.graph.build import Builder, fake_mode_of
from mstpass.graph.cost import flops, time_us
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.kernels import body_bytes
from mstpass.graph.sizes import hint_shape
from mstpass.partition.problem import Loop, Mode, RegionModes, Result
from mstpass.plans import ChunkPlan, LoopOutput, LoopPlan

WHOLE = "whole"  # the mode without loops
_ACCUMULATOR_BYTES = 4


def region_modes(
    joint: JointGraph, choices: Sequence[Choices], accumulate: str
) -> tuple[RegionModes, ...]:
    """The modes of regions: their chunk plans by name, and to stay whole where they may.

    Raises:
        CannotTake: a loop's body cannot be built.
    """
    known: dict[object, int] = {}
    return tuple(
        RegionModes(
            choice.region,
            (
                *([Mode(WHOLE)] if choice.whole_first else []),
                *(_mode(joint, name, plan, accumulate, known) for name, plan in choice.plans),
                *([Mode(WHOLE)] if choice.optional and not choice.whole_first else []),
            ),
        )
        for choice in choices
    )


def _mode(
    joint: JointGraph, name: str, plan: ChunkPlan, accumulate: str, known: dict[object, int]
) -> Mode:
    return Mode(name, tuple(_loop(joint, plan, loop, accumulate, known) for loop in plan.loops))


def _loop(
    joint: JointGraph, plan: ChunkPlan, loop: LoopPlan, accumulate: str, known: dict[object, int]
) -> Loop:
    prelude = set(loop.prelude)
    needs = [item.node for item in loop.inputs if item.node not in prelude]
    for name in loop.prelude:
        operands = joint.by_name[name].all_input_nodes
        needs += [n.name for n in operands if n.name not in prelude and n.name != loop.unit]
    return Loop(
        name=f"loop:{loop.outputs[0].node}",
        members=loop.members,
        needs=tuple(n for n in dict.fromkeys(needs) if joint.by_name[n].op != "get_attr"),
        results=tuple(_result(joint, loop, item, accumulate) for item in loop.outputs),
        inner_bytes=_inner_bytes(joint, plan, loop, accumulate, known),
        us=_time_us(joint, plan, loop),
    )


def _result(joint: JointGraph, loop: LoopPlan, item: LoopOutput, accumulate: str) -> Result:
    node = joint.by_name[item.node]
    size = nbytes(node)
    value = value_of(node)
    scale = loop.unit or "" if item.scaled else ""
    if item.spec is None and accumulate == "float32" and value is not None:
        cast = value.element_size() < _ACCUMULATOR_BYTES
        wide = max(_ACCUMULATOR_BYTES, value.element_size())
        return Result(item.node, size // value.element_size() * wide, scale, cast)
    return Result(item.node, size, scale)


def _inner_bytes(
    joint: JointGraph, plan: ChunkPlan, loop: LoopPlan, accumulate: str, known: dict[object, int]
) -> int:
    """Of one chunk, by its body; loops that do the same on the same shapes share the answer."""
    key = _structure(joint, plan, loop)
    if key not in known:
        graph = fx.Graph()
        builder = Builder(graph, fake_mode_of(joint.nodes))
        parts = build_body(joint, plan, loop, builder, accumulate)
        kinds = [STACK if item.spec else SUM for item in loop.outputs]
        known[key] = body_bytes(graph, parts, kinds)
    return known[key]


def _structure(joint: JointGraph, plan: ChunkPlan, loop: LoopPlan) -> object:
    specs = dict(plan.members)
    number: dict[fx.Node, int] = {}
    rows: list[object] = [plan.chunk_tokens, plan.num_tokens, plan.symbolic]
    rows += [item.spec for item in loop.inputs]
    rows += [(item.spec, loop.members.index(item.node)) for item in loop.outputs]
    for name in (*(item.node for item in loop.inputs), *loop.members):
        node = joint.by_name[name]
        number[node] = len(number)
        tensors = [(t.dtype, hint_shape(t)) for t in tensors_of(node.meta.get("val"))]
        rows.append((specs.get(name), tensors))
        if name in specs:
            args = fx.map_arg((node.args, node.kwargs), lambda n: ("node", number.get(n, -1)))
            rows.append((node.target, args))
    return repr(rows)


def _time_us(joint: JointGraph, plan: ChunkPlan, loop: LoopPlan) -> float:
    inside = [joint.by_name[name] for name in loop.members]
    device = next(v.device for node in inside for v in tensors_of(node.meta["val"]))
    costs = costs_of(device)
    work = sum(map(flops, inside)) / plan.num_tokens
    whole = sum(map(time_us, inside))
    if not work:
        return whole + plan.num_chunks * costs.chunk_us
    return whole * costs.relative_time(plan.chunk_tokens, work)
