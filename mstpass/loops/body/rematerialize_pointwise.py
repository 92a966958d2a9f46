"""Compute a chunk's wide pointwise values again at each of their readers instead of keeping them.

Inductor writes a pointwise value that several kernels read to memory if it is slow to compute: an
exp, log or sigmoid on the CPU, or an expression of many reads or many ops
(``StorageBox.should_realize_on_reuse`` in torch/_inductor/ir.py). A softmax that its
entropy, its row sums and the gradient read is then one more buffer of chunk x vocabulary. Given a
copy of its own, each reader absorbs it, and the readers become one kernel that computes it once in
each pass over the row. Values that a matmul or attention reads or that leave the chunk need a
buffer in any case, so they are not copied.

The number of reads and ops is that of the whole expression, with what it reads of each row, such as
the logarithm of a sum. Those narrow values (``c`` elements) are materialized, so that each of them
counts as one read and no op.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention import is_product
from mstpass.graph.joint import numel
from mstpass.graph.materialization import materialize

_WIDE = 0.25  # of the elements of the body's largest matmul result
_MOST_COPIES = 400  # a chain of values that are each read twice doubles with each of them


def rematerialize_at_readers(graph: fx.Graph) -> None:
    """Give every reader of a wide pointwise value its own copy of that value, in place."""
    nodes = list(graph.nodes)
    wide = _WIDE * _largest_product(nodes)
    copies = 0
    for node in reversed(nodes):  # readers first: their copies need copies as well
        if numel(node) < wide or not _can_be_absorbed(node):
            continue
        for user in list(node.users)[1:]:
            if copies == _MOST_COPIES:
                return
            copies += 1
            with graph.inserting_after(node):
                user.replace_input_with(node, graph.node_copy(node))


def materialize_row_values(graph: fx.Graph) -> None:
    """Materialize the narrow pointwise values that wide ones read, in place."""
    nodes = list(graph.nodes)
    wide = _WIDE * _largest_product(nodes)
    for node in nodes:
        if node.op != "call_function" or not ops.is_pointwise(node) or ops.is_cheap_view(node):
            continue
        if 1 < numel(node) < wide and any(
            numel(reader) >= wide and ops.is_pointwise(reader)
            for reader in ops.readers_through_views(node)
        ):
            written = materialize(node)
            node.replace_all_uses_with(written, lambda user, own=written: user is not own)


def _largest_product(nodes: list[fx.Node]) -> int:
    return max((numel(node) for node in nodes if ops.is_matmul(node)), default=0)


def _can_be_absorbed(node: fx.Node) -> bool:
    """Whether the node is a pointwise value, or a view of one, that needs no buffer of its own."""
    while ops.is_cheap_view(node):
        node = node.all_input_nodes[0]
    return ops.is_pointwise(node) and not any(
        reader.op == "output" or is_product(reader) for reader in ops.readers_through_views(node)
    )
