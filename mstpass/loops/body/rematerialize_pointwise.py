"""Compute a chunk's wide pointwise values where they are read, instead of keeping them; write what
they read of each row.

Inductor keeps a pointwise value that several kernels read if it is dear: an exp, log or sigmoid on
the CPU, many reads or many operations (``StorageBox.should_realize_on_reuse`` in
torch/_inductor/ir.py, 2.11 and 2.13). A softmax that its entropy, its row sums and the gradient
read is one more buffer of chunk x vocabulary. Read once each, its copies go into the kernels that
read them, and those into one that computes it once a pass over the row.

What a matmul reads, or what leaves the chunk, has to exist and is not repeated.

Many reads or operations are those of a whole expression, of what it reads of each row as well, such
as the logarithm of a sum. Written once, c values, that is one read and no operation.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import op_table
from mstpass.graph.joint import numel
from mstpass.graph.materialization import realized

_WIDE = 0.25  # of the largest product
_MOST_COPIES = 400  # a chain whose every value is read twice doubles with each


def rematerialize_at_readers(graph: fx.Graph) -> None:
    """Give every reader of a wide pointwise value its own copy of what computes it, in place."""
    nodes = list(graph.nodes)
    widest = max((numel(n) for n in nodes if op_table.is_matmul(n)), default=0)
    copies = 0
    for node in reversed(nodes):  # readers first: their copies want copies as well
        if numel(node) < _WIDE * widest or not _is_free(node):
            continue
        for user in list(node.users)[1:]:
            if copies == _MOST_COPIES:
                return
            copies += 1
            with graph.inserting_after(node):
                user.replace_input_with(node, graph.node_copy(node))


def materialize_row_values(graph: fx.Graph) -> None:
    """Write what wide pointwise values read of each row to memory, in place."""
    nodes = list(graph.nodes)
    widest = max((numel(n) for n in nodes if op_table.is_matmul(n)), default=0)
    for node in nodes:
        if (
            node.op != "call_function"
            or not op_table.is_pointwise(node)
            or op_table.is_cheap_view(node)
        ):
            continue
        if 1 < numel(node) < _WIDE * widest and any(
            numel(reader) >= _WIDE * widest and op_table.is_pointwise(reader)
            for reader in op_table.readers(node)
        ):
            written = realized(node)
            node.replace_all_uses_with(written, lambda user, own=written: user is not own)


def _is_free(node: fx.Node) -> bool:
    """A pointwise value that no kernel has to write."""
    while op_table.is_cheap_view(node):
        node = node.all_input_nodes[0]
    return op_table.is_pointwise(node) and not any(
        reader.op == "output" or op_table.is_matmul(reader) for reader in op_table.readers(node)
    )
