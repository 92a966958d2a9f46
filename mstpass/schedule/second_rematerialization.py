"""Recompute a cheap value once more for its late readers, where keeping it holds up the peak.

The backward has each recomputed value once, just before its first use. Least memory recomputes an
attention's operands from the norm before it, and the weights' gradients read that norm again when
the attention's backward is over; in between lies the peak of the step::

    while a value at the backward's peak is cheap, and is read before it and after it:
        copy what it is computed from, down to what is alive at the late readers anyway
        keep the copies if the simulated peak does not rise and that at this place falls

schedule/delay_recomputation.py holds the copies back to their place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import Modules
from mstpass.graph.node_copies import copy_nodes
from mstpass.graph.recompute_rules import is_heavy, is_pinned
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.timeline import StepMemory

_TRIES = 16


def add_second_rematerialization(
    modules: Modules, memory: StepMemory, scatters_delayed: bool
) -> tuple[Modules, StepMemory]:
    """The modules with such copies in the backward, and their memory; both as given where no copy
    lowers it. ``scatters_delayed`` as in ``simulate_step``."""
    forward, backward = modules
    other = fx.GraphModule(backward, copy.deepcopy(backward.graph))
    other.meta = dict(backward.meta)
    graph, lower = other.graph, memory
    for _ in range(_TRIES):
        if lower.peak is not lower.backward:
            break
        found = next(_lowered(forward.graph, graph, lower, scatters_delayed), None)
        if found is None:
            break
        lower = found
    if lower is memory:
        return modules, memory
    graph.lint()
    other.recompile()
    return (forward, other), lower


def _lowered(
    forward: fx.Graph, graph: fx.Graph, memory: StepMemory, scatters_delayed: bool
) -> Iterator[StepMemory]:
    """The memory with each copy that lowers it; what does not is taken out again."""
    peak = memory.backward.peak
    order = {node: i for i, node in enumerate(graph.nodes)}
    by_name = {node.name: node for node in graph.nodes}
    here = order[by_name[peak.node]]
    for moment in memory.backward.alive:
        if moment.node not in by_name:  # the caller holds it
            continue
        value = by_name[moment.node]
        readers = ops.readers_through_views(value)
        late = sorted({r for r in readers if order[r] > here}, key=order.__getitem__)
        if not late or len(late) == len(set(readers)):
            continue
        chain = _chain(value, late, order)
        if not chain:
            continue
        copies = copy_nodes(chain, late[0])
        for reader in late:
            for old, new in copies.items():
                reader.replace_input_with(old, new)
        after = simulate_step(forward, graph, scatters_delayed)
        there = next(m.bytes for m in after.backward.moments if m.node == peak.node)
        if after.peak_bytes <= memory.peak_bytes and there < peak.bytes:
            yield after
            return
        for reader in late:
            for old, new in copies.items():
                reader.replace_input_with(new, old)
        for new in reversed(copies.values()):
            graph.erase_node(new)


def _chain(value: fx.Node, late: list[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node]:
    """What to copy, in order: the value's views that are read late, the value, and what it is
    computed from; empty where that takes more than cheap ops."""
    found: set[fx.Node] = set()
    stack = [i for reader in late for i in reader.all_input_nodes if base_of(i) is value]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if base_of(node) is not value and _kept_until(node, order[late[0]], order):
            continue
        if not is_cheap(node):
            return []
        found.add(node)
        stack.extend(node.all_input_nodes)
    return sorted(found, key=order.__getitem__)


def base_of(node: fx.Node) -> fx.Node:
    """For a view, what it is a view of."""
    while ops.is_cheap_view(node):
        node = node.all_input_nodes[0]
    return node


def _kept_until(node: fx.Node, place: int, order: dict[fx.Node, int]) -> bool:
    """Whether others keep a value alive up to a place of the order."""
    base = base_of(node)
    return base.op != "call_function" or any(
        order[r] >= place for r in ops.readers_through_views(base)
    )


def is_cheap(node: fx.Node) -> bool:
    """Pointwise ops, reductions and views that may be repeated."""
    if node.op != "call_function" or is_heavy(node) or is_pinned(node):
        return False
    return ops.is_pointwise(node) or ops.is_reduction(node) or ops.is_cheap_view(node)
