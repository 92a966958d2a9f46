"""How many bytes an op reads and writes, given that Inductor fuses what it can.

A value is *stored* if memory holds it: an input of the graph, the result of an op that runs as a
call (a product, attention, a sort), or a fused value that such an op or the graph's output reads.
All other values exist in registers only. Kernels are taken to be fused as far as possible: each
phase writes a stored value once and reads it once, however many of its ops read it. So

    bytes of a fused op  =  bytes of the result, if it is stored
                            + bytes of each stored operand / fused readers of it in this phase
    bytes of a call      =  bytes of the result and of all operands

A reduction's result is stored.
"""

from __future__ import annotations

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, nbytes, tensors_of
from mstpass.graph.sizes import hint_numel, is_size

_FUSED_KINDS = frozenset({"pointwise", "reduce", "create", "index"})


def moved_bytes(joint: JointGraph, node: fx.Node) -> float:
    """Bytes that the op reads and writes; 0 for views and for nodes that are no calls."""
    return joint.cached(_Traffic).moved_bytes(node)


def computed_bytes(node: fx.Node) -> float:
    """The bytes that a CPU could move while it computes a fused op; 0 for calls and views."""
    if node.op != "call_function" or is_size(node) or not _is_fused(node):
        return 0.0
    if ops.is_scatter(node):  # a kernel of its own: a copy, and what is written
        return 2 * nbytes(node)
    return ops.row(node).work * sum(map(hint_numel, tensors_of(node.meta.get("val"))))


class _Traffic:
    """The traffic of one graph; what is asked of a node is computed once."""

    def __init__(self, joint: JointGraph):
        self.joint = joint
        self._stored: dict[fx.Node, bool] = {}
        self._readers: dict[fx.Node, tuple[int, int]] = {}

    def moved_bytes(self, node: fx.Node) -> float:
        if node.op != "call_function" or ops.is_view(node) or is_size(node):
            return 0.0
        operands: dict[fx.Node, int] = {}  # by what is stored, the bytes that a view shows of it
        for operand in node.all_input_nodes:
            base = ops.base_of(operand)
            operands[base] = max(operands.get(base, 0), min(nbytes(operand), nbytes(base)))
        if not _is_fused(node):
            return nbytes(node) + sum(operands.values())
        written = nbytes(node) if self._is_stored(node) else 0
        return written + sum(self._share(base, node) * size for base, size in operands.items())

    def _share(self, operand: fx.Node, reader: fx.Node) -> float:
        """The share of an operand's reading that one of its readers counts."""
        if not self._is_stored(operand):
            return 0.0
        if operand not in self._readers:
            fused = [n for n in ops.readers_through_views(operand) if _is_fused(n)]
            in_backward = sum(n in self.joint.backward for n in fused)
            self._readers[operand] = len(fused) - in_backward, in_backward
        readers = self._readers[operand][reader in self.joint.backward]
        return 1 / max(1, readers)

    def _is_stored(self, node: fx.Node) -> bool:
        if node not in self._stored:
            self._stored[node] = (
                not _is_fused(node)
                or ops.is_reduction(node)
                or not all(map(_is_fused, ops.readers_through_views(node)))
            )
        return self._stored[node]


def _is_fused(node: fx.Node) -> bool:
    return ops.row(node).kind in _FUSED_KINDS
