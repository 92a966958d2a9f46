"""Recompute a block when its gradient arrives, not before.

The backward graph has each recomputed value just before its first use, but Inductor fuses kernels
that merely read alike: the norm of a block that is recomputed next goes into a kernel of the block
before, and from there its projections and half of its attention live beside those of two blocks.
The cure is an order between what has no data in common::

    for the first kernel of each recomputation that contains a matmul, in the graph's order:
        it waits for the gradients that are alive where it stands

so that what the backward has done by then is done, and freed. Gradients that only leave the graph,
and values that are recomputed once more (again.py), are held to their places likewise. (XLA's
optimization barriers serve ``jax.checkpoint`` in the same way.)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import is_tangent, nbytes, value_of
from mstpass.graph.recompute_rules import is_heavy
from mstpass.schedule.second_rematerialization import is_cheap
from mstpass.torch_internals.control_dependencies import make_wait
from mstpass.torch_internals.op_types import OpOverload

_LOOP = torch.ops.higher_order.while_loop


def delay_recomputation(graph: fx.Graph) -> None:
    """Order a backward's recomputations behind the gradients before them, in place."""
    if not any(is_tangent(node) for node in graph.find_nodes(op="placeholder")):
        return
    every = (recomputation_waits(graph), gradient_waits(graph), copy_waits(graph))
    waits = {
        node: tuple(other for waits in every for other in waits.get(node, ()))
        for node in graph.nodes
        if any(node in waits for waits in every)
    }
    make_wait(graph, waits)


def recomputation_waits(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """What the first kernel of each recomputation is to wait for. Changes nothing."""
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    gradients = _descendants(filter(is_tangent, nodes))
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
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
        alive = tuple(k for k in kernels if k is not None) or alive
        if alive:
            waits[node] = alive
        last = here
    return waits


def gradient_waits(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For heavy ops, the gradients before them that only leave the graph, such as a weight's.

    Nothing else reads them, so Inductor may put them off, and what they are made of stays alive.
    """
    kept = set(graph.output_node().all_input_nodes)
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
    pending: list[fx.Node] = []
    for node in graph.nodes:
        heavy = node.op == "call_function" and _is_heavy(node)
        if (heavy or ops.is_reduction(node)) and _leaves(node, kept):
            pending.append(node)
        elif heavy and pending:
            waits[node] = tuple(pending)
            pending = []
    return waits


def copy_waits(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For copies, what their readers read beside them: until that is there, they are not needed.

    A copy is a node that computes what an earlier one does. Of all that a value is computed from
    the smallest waits, as what waits is written to memory.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    copies = _copies(graph)
    waits: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in copies:
        readers = [r for r in ops.readers_through_views(node) if r not in copies]
        value = value_of(node)
        floating = value is not None and value.is_floating_point()
        if ops.is_cheap_view(node) or not readers or not floating:
            continue
        chain = _within(node, copies)
        first = min(order[n] for n in chain)
        beside = (_kernel(i) for reader in readers for i in reader.all_input_nodes)
        kernels = [k for k in dict.fromkeys(beside) if k is not None and k not in chain]
        before = tuple(k for k in kernels if order[k] < first)
        if before:
            least = min(chain, key=lambda n: (nbytes(n), order[n]))
            waits[least] = tuple(dict.fromkeys((*waits.get(least, ()), *before)))
    return waits


def _copies(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Nodes that compute what an earlier one does, with that one."""
    originals: dict[object, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if is_cheap(node) and not ops.is_constant(node):
            args = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            original = originals.setdefault((node.target, repr(args)), node)
            if original is not node:
                copies[node] = original
    return copies


def _within(last: fx.Node, copies: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The kernels among copies that one of them is computed from, itself included."""
    found: set[fx.Node] = set()
    stack = [last]
    while stack:
        node = stack.pop()
        if node in copies and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return {node for node in found if not ops.is_cheap_view(node)}


def _leaves(node: fx.Node, kept: set[fx.Node]) -> bool:
    return node in kept or any(ops.is_cheap_view(u) and _leaves(u, kept) for u in node.users)


def _descendants(sources: Iterable[fx.Node]) -> set[fx.Node]:
    stack = list(sources)
    found = set(stack)
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _first_kernels(nodes: list[fx.Node], gradients: set[fx.Node]) -> list[fx.Node]:
    """Reductions and heavy ops that recomputations with a heavy op start with, in order."""
    recomputed = [n for n in nodes if n.op == "call_function" and n not in gradients]
    leads: set[fx.Node] = set()
    for node in reversed(recomputed):
        if _is_heavy(node) or any(user in leads for user in node.users):
            leads.add(node)
    behind: set[fx.Node] = set()
    first = []
    for node in recomputed:
        if any(operand in behind for operand in node.all_input_nodes):
            behind.add(node)
        elif node in leads and (_is_heavy(node) or ops.is_reduction(node)):
            first.append(node)
            behind.add(node)
    return first


def _is_heavy(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_heavy(node)


def _kernel(node: fx.Node) -> fx.Node | None:
    """What a kernel writes where the node stands: for a view its base; None where that is no one.

    A loop's results are none: Inductor names them by the buffers that were there before it.
    """
    while ops.is_cheap_view(node):
        node = node.all_input_nodes[0]
    value = value_of(node)
    if node.op != "call_function" or value is None or not value.is_floating_point():
        return None
    if node.target is operator.getitem and node.all_input_nodes[0].target is _LOOP:
        return None
    return node
