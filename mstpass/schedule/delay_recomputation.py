"""Recompute a block when its gradient arrives, not before.

The backward graph has each recomputed value just before its first use. But Inductor fuses kernels
that read the same buffer: the norm of the block that is recomputed next moves into a kernel of the
block before it, its projections and half of its attention follow, and the values of two blocks are
alive at once. This rewrite adds an order between nodes that have no data in common:

1. *Recomputations*: the first kernel of each recomputation that contains a heavy op, or that a loop
   reads, waits for the gradients that are alive at its place in the graph. By then, the backward
   before it is done, and its buffers are freed. Behind a loop of the backward, a recomputation
   that goes on begins anew.
2. *Gradients that only leave the graph*, such as a weight's: the next heavy op waits for them.
   Nothing else reads them, so Inductor may compute them late, and keep their operands alive.
3. *Copies* of cheap values (memory/repeated_values.py): each waits for the other
   operands of its readers, because it is not needed before they exist.

A node waits by an op that takes the nodes it waits for as inputs
(torch_internals/inductor.py). XLA's optimization barriers serve ``jax.checkpoint`` in
the same way.

``host_copy_waits`` keeps the copies to the host and back at their places in the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Set

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.buffer_ops import done
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import descendants, is_tangent, nbytes, value_of
from mstpass.graph.loop_op import is_host_copy
from mstpass.graph.own_ops import REALIZE
from mstpass.graph.recompute_rules import is_heavy, is_pinned
from mstpass.memory.repeated_values import CHEAP_KINDS
from mstpass.memory.simulate_graph import kind_of
from mstpass.torch_internals.graphs import OpOverload
from mstpass.walk import walk, walk_once

_LOOP = torch.ops.higher_order.while_loop

Waits = dict[fx.Node, tuple[fx.Node, ...]]  # for each node the nodes that it waits for


def delay_recomputation(graph: fx.Graph, takes_time: bool = True) -> Waits:
    """What nodes of a backward wait for by the rules above; nothing in a graph without tangents.

    Args:
        takes_time: False leaves the order to Inductor where nothing heavy is recomputed.
            Then only such heavy ops of rule 2 are waited for as read a recomputed value, because
            a kernel that other gradients read is fused with these, and computed as late as they.
    """
    if not any(is_tangent(node) for node in graph.find_nodes(op="placeholder")):
        return {}
    recomputation = recomputation_waits(graph)
    if not takes_time and not recomputation:
        return gradient_waits(graph, _reads_shared_recomputation(graph))
    return joined(recomputation, gradient_waits(graph), copy_waits(graph))


def joined(*every: Waits) -> Waits:
    """All that the nodes wait for."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for waits in every:
        for node, others in waits.items():
            found[node] = (*found.get(node, ()), *others)
    return found


# ---- recomputations ------------------------------------------------------------------------------
def recomputation_waits(graph: fx.Graph) -> Waits:
    """What the first kernel of each recomputation waits for (1). The graph does not change."""
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    gradients = descendants(filter(is_tangent, nodes))
    waits: Waits = {}
    alive: tuple[fx.Node, ...] = ()
    last = 0
    for node in _first_kernels(nodes, gradients):
        here = index[node]
        used_later = (
            n
            for n in nodes[last:here]
            if n in gradients and any(index[user] > here for user in n.users)
        )
        kernels = dict.fromkeys(k for k in map(_kernel, used_later) if k in gradients)
        alive = tuple(k for k in kernels if k is not None and not is_inlined_operand(k)) or alive
        if alive:
            waits[node] = alive
        last = here
    return waits


def _first_kernels(nodes: list[fx.Node], gradients: set[fx.Node]) -> list[fx.Node]:
    """The first reductions and heavy ops of recomputations that lead to a heavy op or a loop."""
    recomputed = [n for n in nodes if n.op == "call_function" and n not in gradients]
    leads_to_heavy: set[fx.Node] = set()
    for node in reversed(recomputed):
        if _is_heavy(node) or any(u in leads_to_heavy or u.target is _LOOP for u in node.users):
            leads_to_heavy.add(node)
    after_first: set[fx.Node] = set()
    first = []
    for node in nodes:
        if node in gradients:
            if node.target is _LOOP:  # what comes after it is not to be computed beside it
                after_first.clear()
        elif any(operand in after_first for operand in node.all_input_nodes):
            after_first.add(node)
        elif node in leads_to_heavy and (_is_heavy(node) or ops.is_reduction(node)):
            first.append(node)
            after_first.add(node)
    return first


def _is_heavy(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_heavy(node) and not _exchanges(node)


def _exchanges(node: fx.Node) -> bool:
    """Whether the node is a collective or waits for one: they neither wait nor are waited for."""
    return is_collective(node) or is_wait(node)


def _kernel(node: fx.Node) -> fx.Node | None:
    """The node whose kernel writes the value: for a view its base; None if no kernel writes it.

    For a loop it is the op that reads its counter when it is done, because Inductor gives the
    results the names of the buffers that the loop was given.
    """
    node = viewed(node)
    value = value_of(node)
    if node.op != "call_function" or value is None or not value.is_floating_point():
        return None
    if _exchanges(node):
        return None
    if node.target is operator.getitem and (loop := node.all_input_nodes[0]).target is _LOOP:
        readers = (reader for item in loop.users for reader in item.users)
        return next((reader for reader in readers if reader.target is done), None)
    return node


def is_inlined_operand(node: fx.Node) -> bool:
    """Whether the operand of a node that waits, or what it is a view of, has no buffer.

    It is better computed where it is read: what others wait for is written to memory, beside what
    it is computed from.
    """
    base = viewed(node)
    if base.op != "call_function" or not _has_no_kernel(base):
        return False
    readers = ops.readers_through_views(base)
    return all(_has_no_kernel(reader) or ops.is_reduction(reader) for reader in readers)


def _has_no_kernel(node: fx.Node) -> bool:
    """Whether Inductor can compute the value where it is read."""
    if ops.is_pointwise(node):
        return node.target is not REALIZE
    return ops.is_padded(node) or ops.is_constant(node)


# ---- gradients that leave the graph --------------------------------------------------------------
def gradient_waits(graph: fx.Graph, only: Set[fx.Node] | None = None) -> Waits:
    """The gradients that each heavy op waits for, because they only leave the graph (2).

    Args:
        only: these gradients alone.
    """
    results = set(graph.output_node().all_input_nodes)
    waits: Waits = {}
    pending: list[fx.Node] = []
    for node in graph.nodes:
        heavy = node.op == "call_function" and _is_heavy(node)
        if (heavy or ops.is_reduction(node)) and _leaves(node, results):
            if only is None or node in only:
                pending.append(node)
        elif heavy and pending:
            waits[node] = tuple(pending)
            pending = []
    return waits


def _reads_shared_recomputation(graph: fx.Graph) -> set[fx.Node]:
    """The heavy ops that read a recomputed value which other gradients read as well."""
    gradients = descendants(filter(is_tangent, graph.find_nodes(op="placeholder")))

    def is_shared(value: fx.Node, reader: fx.Node) -> bool:
        if value in gradients or _kernel(value) is None:
            return False
        return any(r is not reader and r in gradients for r in ops.readers_through_views(value))

    return {
        node
        for node in gradients
        if _is_heavy(node) and any(is_shared(viewed(v), node) for v in node.all_input_nodes)
    }


def _leaves(node: fx.Node, results: set[fx.Node]) -> bool:
    """Whether the node, or a view of it, is a result of the graph."""
    views = walk([node], lambda n: filter(ops.is_cheap_view, n.users))
    return any(view in results for view in views)


# ---- copies --------------------------------------------------------------------------------------
def copy_waits(graph: fx.Graph) -> Waits:
    """What copies of cheap values wait for (3).

    A copy is a node that computes the same as an earlier node. A node that waits is written to
    memory; so of a copy and the copies that it is computed from, the smallest one waits.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    copies = _copies(graph)
    waits: Waits = {}
    for node in copies:
        readers = [r for r in ops.readers_through_views(node) if r not in copies]
        value = value_of(node)
        floating = value is not None and value.is_floating_point()
        if ops.is_cheap_view(node) or not readers or not floating:
            continue
        chain = _copied_operands(node, copies)
        first = min(order[n] for n in chain)
        operands = (_kernel(i) for reader in readers for i in reader.all_input_nodes)
        kernels = [k for k in dict.fromkeys(operands) if k is not None and k not in chain]
        before = tuple(k for k in kernels if order[k] < first)
        if before:
            smallest = min(chain, key=lambda n: (nbytes(n), order[n]))
            waits[smallest] = tuple(dict.fromkeys((*waits.get(smallest, ()), *before)))
    return waits


def _copies(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The cheap nodes that compute the same as an earlier node, each with that node."""
    originals: dict[object, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_cheap(node) and not ops.is_constant(node):
            args = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            original = originals.setdefault((node.target, repr(args)), node)
            if original is not node:
                copies[node] = original
    return copies


def _copied_operands(last: fx.Node, copies: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """A copy and the copies that it is computed from, without views."""
    found = walk_once([last], lambda node: filter(copies.__contains__, node.all_input_nodes))
    return {node for node in found if not ops.is_cheap_view(node)}


def is_cheap(node: fx.Node) -> bool:
    """The kinds of ops that plans count on (memory/program.py), if they may run twice."""
    if node.op != "call_function" or is_heavy(node) or is_pinned(node):
        return False
    return kind_of(node) in CHEAP_KINDS


def viewed(node: fx.Node) -> fx.Node:
    """The value that a view, or a view of a view, shows; any other value itself."""
    while ops.is_cheap_view(node):
        node = node.all_input_nodes[0]
    return node


def host_copy_waits(graph: fx.Graph) -> Waits:
    """What keeps each copy, and each wait for one, between the heavy ops around it.

    Inductor's scheduler knows only what depends on what. It might begin all copies of a backward at
    once, so that all values are back on the device from the start, or end them all at the end of a
    forward. So each of them waits for the heavy op in front of it, and the next heavy op for it.
    """
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
    before: fx.Node | None = None
    pending: list[fx.Node] = []
    for node in graph.nodes:
        if is_host_copy(node):
            if before is not None and before not in node.all_input_nodes:
                waits[node] = (before,)
            pending.append(node)
        elif _is_anchor(node):
            others = tuple(other for other in pending if other not in node.all_input_nodes)
            if others:
                waits[node] = others
            pending, before = [], node
    return waits


def _is_anchor(node: fx.Node) -> bool:
    """Whether other nodes may wait for the node, and it for them: a matmul or attention."""
    return _is_heavy(node) and not is_pinned(node) and value_of(node) is not None
