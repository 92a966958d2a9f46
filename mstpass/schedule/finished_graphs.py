"""Buffers of finished graphs: one for the mask of all heads, and a late one for an embedding.

**The mask of an attention's backward** has one buffer for all heads. A mask is computed once for
each sequence and expanded to all heads, as a view. The forward of memory-efficient attention reads
such a view. For its backward, Inductor writes a mask that has no buffer yet in full, once for each
head: of 8,192 tokens and 32 heads 4 GiB in place of 128 MiB, in bfloat16. A mask has no buffer
where the backward computes it again, which is cheap. Here such a mask is written to memory before
it is expanded.

Source: torch/_inductor/lowering.py (``sdpa_constraint``).

**The gradient of an embedding** is allocated only when its rows are computed. That gradient is
zeros of vocabulary x width to which a scatter adds one row for each token. Inductor computes the
rows inside the scatter's kernel, so that everything they are computed from is alive beside the
whole result. Here the zeros wait for the rows::

    rows = ...                     materialized; what they are computed from is freed
    zeros (after rows) = ...
    gradient = scatter(zeros, rows)

On a GPU each kernel is launched by itself. There the zeros are computed from an element of the
rows, which makes them wait, and a scatter that the rows' kernel were fused with would wait for
itself. Nothing more is launched.

On the CPU an order alone is not enough: neighbouring kernels are one C++ function there, whose
buffers are allocated before it and freed after it. Only a call ends such a function. So the zeros
are made from a matmul of a 1 x 1 zero with itself, and this call waits for the rows
(torch_internals/inductor.py).
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.joint import nbytes, value_of
from mstpass.graph.own_ops import materialize
from mstpass.graph.renew_values import Renewal
from mstpass.memory.simulate_graph import scatters_to_delay
from mstpass.torch_internals.inductor import make_wait


def materialize_masks(graph: fx.Graph) -> None:
    """Write masks that an attention's backward reads to memory before they are expanded."""
    written: set[fx.Node] = set()
    renewal = Renewal(graph)
    for node in list(graph.nodes):
        attention = ops.row(node).attention
        if attention is None or attention.mask_to_write is None:
            continue
        mask = node.args[attention.mask_to_write]
        if not isinstance(mask, fx.Node):
            continue
        view, base = _last_view(mask)
        if view is not None and _is_expanded(mask, base) and base not in written:
            buffer = materialize(base)
            view.replace_input_with(base, buffer)
            renewal.replaced(base, buffer)
            written.add(buffer)
    for node in graph.nodes if written else ():
        renewal.renew(node)


def _last_view(mask: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The mask's first view of a value that is none, and that value."""
    view, base = None, mask
    while ops.is_cheap_view(base):
        view, base = base, base.all_input_nodes[0]
    return view, base


def _is_expanded(mask: fx.Node, base: fx.Node) -> bool:
    """Whether the mask is larger than the computed value that it shows."""
    computed = base.op == "call_function" and value_of(base) is not None
    return computed and nbytes(mask) > nbytes(base)


aten = torch.ops.aten


def delay_scatters(graph: fx.Graph) -> None:
    """Make the large scatters of a graph wait for their rows, in place."""
    for scatter, rows in scatters_to_delay(graph).items():
        value = scatter.meta["val"]
        builder = Builder(graph, fake_mode_of(graph.nodes))
        on_cpu = value.device.type == "cpu"
        written = rows if on_cpu else materialize(rows)
        scatter.replace_input_with(rows, written)
        with graph.inserting_before(scatter):
            zero = _zero_by_matmul(builder, rows) if on_cpu else _zero_from(builder, written)
            flat = builder.call(aten.view.default, zero, [1] * value.dim())
            one = builder.call(aten.expand.default, flat, list(value.shape))
            # Inductor may run the scatter in place, on its zeros: older ones also where one
            # element stands for all of them. The copy costs nothing: the scatter would make it.
            zeros = builder.call(aten.clone.default, one, memory_format=torch.contiguous_format)
        scatter.update_arg(0, zeros)
        if on_cpu:
            make_wait(graph, {zero: [rows]})


def _zero_by_matmul(builder: Builder, rows: fx.Node) -> fx.Node:
    """A zero of the rows' dtype that a call computes."""
    like = rows.meta["val"]
    zero = builder.call(aten.full.default, [1, 1], 0, dtype=like.dtype, device=like.device)
    return builder.call(aten.mm.default, zero, zero)


def _zero_from(builder: Builder, rows: fx.Node) -> fx.Node:
    """A zero that reads the first element of the rows, even where that is not a number."""
    first = rows
    for dim in range(rows.meta["val"].dim()):
        first = builder.call(aten.slice.Tensor, first, dim, 0, 1)
    differs = builder.call(aten.ne.Tensor, first, first)
    dtype = rows.meta["val"].dtype
    number = builder.call(torch.ops.prims.convert_element_type.default, differs, dtype)
    return builder.call(aten.mul.Tensor, number, 0)
