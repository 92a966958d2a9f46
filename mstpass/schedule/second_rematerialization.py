"""Compute a cheap value once more for its later readers, if keeping it until then raises the peak.

The backward computes each recomputed value once, just before its first use, and keeps it to the
last. The least-memory plan recomputes the operands of attention from the norm before it. That norm
is read first by attention's projections and again, when attention's backward is over, by the
gradients of their weights; the peak of the step lies in between. The rewrite::

    repeat, while the backward has the peak:
        for each value alive at the peak, the largest first:
            if it has readers before and after the peak, and is cheap to compute:
                copy it, and what it is computed from, to just before the first later reader,
                  down to values that are alive there in any case
                keep the copies if the step's peak does not rise and the bytes at this place fall

schedule/delay_recomputation.py keeps the copies from being computed earlier.
"""

from __future__ import annotations

import copy

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import Modules
from mstpass.graph.node_copies import copy_nodes
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.timeline import Moment, StepMemory
from mstpass.schedule.cheap_values import is_cheap, viewed

_MOST_COPIED = 16  # values of one graph


def add_second_rematerialization(
    modules: Modules, memory: StepMemory, scatters_delayed: bool
) -> tuple[Modules, StepMemory]:
    """Forward and backward with such copies, and their simulated memory.

    Both are as given if no copy lowers the memory. The given modules do not change.

    Args:
        memory: the simulated memory of the modules.
        scatters_delayed: as in ``simulate_step``.
    """
    forward, backward = modules
    other = fx.GraphModule(backward, copy.deepcopy(backward.graph))
    other.meta = dict(backward.meta)
    lowered = memory
    for _ in range(_MOST_COPIED):
        if lowered.peak is not lowered.backward:
            break
        lower = _with_one_copy(forward.graph, other.graph, lowered, scatters_delayed)
        if lower is None:
            break
        lowered = lower
    if lowered is memory:
        return modules, memory
    other.graph.lint()
    other.recompile()
    return (forward, other), lowered


def _with_one_copy(
    forward: fx.Graph, backward: fx.Graph, memory: StepMemory, scatters_delayed: bool
) -> StepMemory | None:
    """Copy the first value whose copy lowers the memory, in place. None if there is no such value.

    Copies that do not help are removed again.
    """
    peak = memory.backward.peak
    order = {node: i for i, node in enumerate(backward.nodes)}
    by_name = {node.name: node for node in backward.nodes}
    for alive in memory.backward.alive:
        if alive.node not in by_name:  # an output of the forward, held by the caller
            continue
        value = by_name[alive.node]
        later = _later_readers(value, order[by_name[peak.node]], order)
        chain = _chain(value, later, order) if later else []
        if not chain:
            continue
        copies = copy_nodes(chain, later[0])
        _replace_inputs(later, copies)
        after = simulate_step(forward, backward, scatters_delayed)
        if after.peak_bytes <= memory.peak_bytes and _bytes_at(peak, after) < peak.bytes:
            return after
        _replace_inputs(later, {new: old for old, new in copies.items()})
        for new in reversed(copies.values()):
            backward.erase_node(new)
    return None


def _later_readers(value: fx.Node, place: int, order: dict[fx.Node, int]) -> list[fx.Node]:
    """The readers after a place, in order; none if there are no readers before it."""
    readers = set(ops.readers_through_views(value))
    later = sorted((r for r in readers if order[r] > place), key=order.__getitem__)
    return later if len(later) < len(readers) else []


def _replace_inputs(readers: list[fx.Node], by: dict[fx.Node, fx.Node]) -> None:
    for reader in readers:
        for old, new in by.items():
            reader.replace_input_with(old, new)


def _bytes_at(place: Moment, memory: StepMemory) -> int:
    return next(m.bytes for m in memory.backward.moments if m.node == place.node)


def _chain(value: fx.Node, later: list[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node]:
    """The nodes to copy, in order: the value, its views that are read later, and its operands.

    Operands end at values that others keep alive until the first later reader. Empty if an op on
    the way is not cheap.
    """
    found: set[fx.Node] = set()
    stack = [i for reader in later for i in reader.all_input_nodes if viewed(i) is value]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if viewed(node) is not value and _is_alive_until(node, order[later[0]], order):
            continue
        if not is_cheap(node):
            return []
        found.add(node)
        stack.extend(node.all_input_nodes)
    return sorted(found, key=order.__getitem__)


def _is_alive_until(node: fx.Node, place: int, order: dict[fx.Node, int]) -> bool:
    """Whether the value is an input of the graph, or is read at the place or after it."""
    base = viewed(node)
    return base.op != "call_function" or any(
        order[r] >= place for r in ops.readers_through_views(base)
    )
