"""What each mode of a region costs, in bytes and microseconds, for the partition problem.

A mode is a chunk plan; each of its loops becomes a ``Loop`` of the problem:

    needs        the nodes that it reads
    results      the buffers that it returns: stacked outputs, and sums in the accumulator's dtype
    inner_bytes  the peak of one chunk, simulated over the loop's body, and the copies of inputs
                 that no view can slice
    us           the time of the loop by the costs of its device (graph/device_costs.py)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from torch import fx

from mstpass.graph.axes import ALONG_A_DIM, axis_of
from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.call_work import attention_work, moved_bytes
from mstpass.graph.device_costs import costs_of
from mstpass.graph.joint import JointGraph, nbytes, tensors_of, value_of
from mstpass.graph.loop_op import bytes_of_rows, is_in_rows
from mstpass.graph.loop_work import loop_work
from mstpass.graph.narrow_offsets import narrow_calls
from mstpass.graph.sizes import generic
from mstpass.loops.body.build import build_body
from mstpass.loops.body.key import body_key
from mstpass.loops.candidate_modes import RegionCandidates
from mstpass.loops.operand_layout import is_copied
from mstpass.loops.plan_region import renamed_plan
from mstpass.loops.region_facts import members_of
from mstpass.loops.write_loop import inputs_of
from mstpass.memory.allocation import allocated_bytes, buffer_bytes
from mstpass.memory.simulate_graph import body_bytes
from mstpass.partition.solvers.choose_modes import held_bytes, returned_bytes
from mstpass.plans import LoopOutput, LoopPlan
from mstpass.problem.names import loop_name, renamed
from mstpass.problem.problem import WHOLE, Loop, LoopResult, Mode, RegionModes

_AS_LEAN = 1.05  # factor of the bytes that a loop holds


def region_modes(
    joint: JointGraph, candidates: Sequence[RegionCandidates]
) -> tuple[RegionModes, ...]:
    """The modes of each region, in the order of preference; ``WHOLE`` where it may stay whole.

    Without those that another mode outdoes; but where batches may be longer than the one at hand,
    or chunks are as the user asks, it is not known which do.

    Raises:
        CannotTake: a loop's body cannot be built.
    """
    loops = _Loops(joint)
    found: list[RegionModes] = []
    known: dict[str, tuple[RegionCandidates, RegionModes]] = {}
    for region in candidates:
        if region.original in known and _is_copy(region, known[region.original][0]):
            name_of = functools.partial(_new_name, region.names)
            found.append(renamed(known[region.original][1], name_of))
            continue
        modes = [
            dataclasses.replace(m, loops=tuple(map(loops.of, plan.loops)))
            for m, plan in region.plans
        ]
        others = modes if region.optional else []
        kept = (m for m in modes if m is modes[0] or not any(_is_better(x, m) for x in others))
        first = [Mode(WHOLE)] if region.whole_first else []
        last = [Mode(WHOLE)] if region.optional and not region.whole_first else []
        found.append(RegionModes(region.region, (*first, *kept, *last)))
        known[region.region] = region, found[-1]
    return tuple(found)


def _new_name(names: Mapping[str, str], name: str) -> str:
    return names.get(name, name)


def _is_copy(region: RegionCandidates, original: RegionCandidates) -> bool:
    """Whether a region has the same ways to run as the one that it is equal to."""
    ways = (original.optional, original.whole_first, len(original.plans))
    return ways == (region.optional, region.whole_first, len(region.plans)) and all(
        mode == other and renamed_plan(plan, region.names, copy.source) == copy
        for (mode, plan), (other, copy) in zip(original.plans, region.plans, strict=True)
    )


def copied_nodes(
    joint: JointGraph, candidates: Sequence[RegionCandidates]
) -> dict[fx.Node, tuple[fx.Node, Mapping[str, str]]]:
    """The nodes of regions that are equal to others: each with its original, and all names."""
    node = joint.by_name
    regions = {region.region: region for region in candidates}
    return {
        node[region.names[name]]: (node[name], region.names)
        for region in candidates
        if region.original in regions
        for name in regions[region.original].members
        if region.names.get(name, name) != name
        and all(n.name in region.names for n in (*node[name].all_input_nodes, *node[name].users))
    }


def _is_better(mode: Mode, other: Mode) -> bool:
    """Whether a mode computes the same as another one in less time and is as lean."""
    if mode.wide != other.wide or _members(mode) != _members(other):
        return False
    (held, returned, us), (others_held, others_returned, others_us) = map(_costs, (mode, other))
    return us < others_us and held <= _AS_LEAN * others_held and returned <= others_returned


def _members(mode: Mode) -> set[str]:
    return {name for loop in mode.loops for name in loop.members}


def _costs(mode: Mode) -> tuple[int, int, float]:
    """The bytes that the loops hold, those that they return, and their time."""
    return held_bytes(mode), returned_bytes(mode), sum(loop.us for loop in mode.loops)


class _Loops:
    """Turns the loops of chunk plans into plain data; loops that are alike are simulated once."""

    def __init__(self, joint: JointGraph):
        self.joint = joint
        self.chunks: dict[str, tuple[int, tuple[str, ...]]] = {}  # by the loop's ``body_key``

    def of(self, loop: LoopPlan) -> Loop:
        chunk_bytes, narrow = self._chunk(loop)
        return Loop(
            name=loop_name(loop.outputs[0].node),
            members=loop.members,
            needs=tuple(n.name for n in inputs_of(self.joint, loop) if n.op != "get_attr"),
            results=tuple(_result(self.joint, loop, o) for o in loop.outputs),
            inner_bytes=chunk_bytes + self._copied_bytes(loop),
            us=self._time_us(loop),
            narrow=narrow,
            in_rows=self._in_rows(loop),
            prelude=(loop.unit, *loop.prelude) if loop.unit and loop.prelude else (),
        )

    def _in_rows(self, loop: LoopPlan) -> tuple[tuple[str, int], ...]:
        """The inputs whose rows lie one behind the other, with the bytes of a chunk's."""
        cut = loop.cut
        axis, whole = axis_of(cut.axis, cut.total), {i.node for i in loop.inputs if not i.spec}
        found: dict[str, int] = {}
        for item in loop.inputs:
            node = self.joint.by_name[item.node]
            value = value_of(node)
            if item.spec and value is not None and item.node not in (*whole, *loop.prelude):
                rows = axis.rows(value.shape, item.spec)
                order = [d for d in rows.order if generic(rows.apart[d]) != 1]
                if order == sorted(order) and is_in_rows(node):
                    found[item.node] = bytes_of_rows(node, cut.total, cut.length)
        return tuple(found.items())

    def _copied_bytes(self, loop: LoopPlan) -> int:
        """Size of the sliced inputs that are copied first, because no view of them is ``[N, ...]``.

        ``x[:, 1:]`` of a ``[B, S, D]`` tensor is one. Heads have a view of their own in any value.
        """
        if loop.cut.axis in ALONG_A_DIM:
            return 0
        operands = ((self.joint.by_name[item.node], item.spec) for item in loop.inputs)
        return sum(
            buffer_bytes(node)
            for node, spec in operands
            if spec and (value := value_of(node)) is not None and is_copied(value, spec)
        )

    def _chunk(self, loop: LoopPlan) -> tuple[int, tuple[str, ...]]:
        """The peak of one chunk, and ``Loop.narrow``; the same for equal loops on equal shapes."""
        key = body_key(self.joint, loop)
        if key not in self.chunks:
            graph = fx.Graph()
            builder = Builder(graph, fake_mode_of(self.joint.nodes))
            parts = build_body(self.joint, loop, builder)
            narrow = tuple(map(str, narrow_calls([graph])))
            self.chunks[key] = body_bytes(graph, parts), narrow
        return self.chunks[key]

    def _time_us(self, loop: LoopPlan) -> float:
        """The time of all chunks; attention's is that of groups of heads, or of queries."""
        chunks = loop.cut
        members = members_of(self.joint, loop)
        costs = costs_of(next(v.device for n in members for v in tensors_of(n.meta["val"])))
        work = loop_work(self.joint, members, chunks.axis, chunks.total, loop.least_sum_bytes)
        us = costs.loop_us(work, work.tokens // chunks.total * chunks.length)
        for node in members:
            if attention := attention_work(node):
                moved = moved_bytes(self.joint, node) / chunks.count
                group = attention.of_group(chunks.count)
                us += chunks.count * costs.attention_us(group, moved)
        return us


def _result(joint: JointGraph, loop: LoopPlan, item: LoopOutput) -> LoopResult:
    """An output as the loop returns it: a sum may be kept in a wider dtype."""
    node = joint.by_name[item.node]
    size = nbytes(node)
    value = value_of(node)
    scale = loop.unit or "" if item.scaled else ""
    adds_up = item.spec is None and item.combine == "sum"
    if adds_up and value is not None:
        cast = value.element_size() < loop.least_sum_bytes
        element_bytes = max(loop.least_sum_bytes, value.element_size())
        size = size // value.element_size() * element_bytes
        return LoopResult(item.node, allocated_bytes(size, value.device), scale, cast)
    return LoopResult(item.node, 0 if item.over else buffer_bytes(node), scale, over=item.over)
