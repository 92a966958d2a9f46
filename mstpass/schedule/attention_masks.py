"""Give the mask of an attention's backward one buffer for all heads.

A mask is computed once for each sequence and expanded to all heads, as a view. The forward of
memory-efficient attention reads such a view. For its backward, Inductor writes a mask that has no
buffer yet in full, once for each head: of 8,192 tokens and 32 heads 4 GiB in place of 128 MiB, in
bfloat16. A mask has no buffer where the backward computes it again, which is cheap. Here such a
mask is written to memory before it is expanded.

Source: torch/_inductor/lowering.py (``sdpa_constraint``).
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import nbytes, value_of
from mstpass.graph.materialization import materialize
from mstpass.graph.renew_values import Renewal


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
