"""Add rows up into a large gradient when the rows are all that is left of what they come from.

Inductor computes the rows of an embedding's gradient where it adds them, so that all they are made
of is alive beside the result of vocabulary x width. Here the zeros that they are added to wait for
the rows: these are written, and what they are made of is freed, before the result is allocated.

On the CPU that takes more than an order. Neighbouring kernels are one C++ function there, whose
buffers are allocated before and freed after all of them; only a call ends it. So the zeros are read
off a product of their own, 0 x 0, which waits for the rows (``control_deps``, see late.py).
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import linearity, ops
from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.joint import nbytes
from mstpass.graph.sizes import is_static
from mstpass.torch_internals.control_dependencies import make_wait

aten = torch.ops.aten

# Ops that add rows into zeros, and the position of the rows.
_SCATTERS = {
    aten.index_put.default: 2,
    aten._unsafe_index_put.default: 2,
    aten._unsafe_masked_index_put_accumulate.default: 3,
    aten.scatter_add.default: 3,
}


def delay_scatters(graph: fx.Graph) -> None:
    """Have the large scatters of a graph wait for their rows, in place."""
    for scatter, rows in scatters_to_delay(graph).items():
        value = scatter.meta["val"]
        builder = Builder(graph, fake_mode_of(graph.nodes))
        with graph.inserting_before(scatter):
            zero = builder.call(
                aten.full.default, [1, 1], 0, dtype=value.dtype, device=value.device
            )
            product = builder.call(aten.mm.default, zero, zero)
            flat = builder.call(aten.view.default, product, [1] * value.dim())
            zeros = builder.call(aten.expand.default, flat, list(value.shape))
        scatter.update_arg(0, zeros)
        make_wait(graph, {product: [rows]})


def scatters_to_delay(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Scatters into zeros, with their rows, where these are smaller than what they come from."""
    return {
        node: rows
        for target, position in _SCATTERS.items()
        for node in graph.find_nodes(op="call_function", target=target)
        if linearity.is_zero(node.args[0]) and is_static(node.meta["val"])
        if isinstance(rows := node.args[position], fx.Node)
        if nbytes(rows) < min(nbytes(node), _freed_bytes(rows))
    }


def _freed_bytes(value: fx.Node) -> int:
    """Bytes of the kernels' results that a value is computed from and that nothing else reads."""
    inlined: set[fx.Node] = set()
    read: set[fx.Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in inlined or node in read:
            continue
        if ops.is_pointwise(node) or ops.is_cheap_view(node):
            inlined.add(node)
            stack.extend(node.all_input_nodes)
        elif node.op == "call_function":
            read.add(node)
    return sum(nbytes(node) for node in read if inlined.issuperset(ops.readers_through_views(node)))
