"""What ops other than products compute and move, as plain data, for the costs of a device.

*Attention*: its work, and how evenly a CPU's threads share it.

The costs of a device (device_costs.py) turn it into a time, for all heads or for a group of them.

torch's CPU kernels (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp) give each thread a run of
blocks of queries in the forward, and a run of whole heads in the backward. So threads wait

- in the forward, where they share a causal head: its last queries see the most keys
- in the backward, where the heads are fewer than the threads, or no multiple of them

*Collectives*: of R ranks, each sends of its operand x or of its result y, by the algorithm that
sends the least::

    all-to-all       x (R - 1) / R, an equal part to each of the others
    all-gather       y (R - 1) / R
    reduce-scatter   x (R - 1) / R
    all-reduce     2 x (R - 1) / R
    broadcast, and an exchange in which a rank has one partner, as in a ring: x

Source: nccl-tests, doc/PERFORMANCE.md.

*Traffic*: how many bytes an op reads and writes, given that Inductor fuses what it can.

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

import dataclasses
import itertools

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention_sizes import attention_sizes, call_of, ceil_div
from mstpass.graph.collectives import group_of, is_collective
from mstpass.graph.joint import JointGraph, nbytes, tensors_of
from mstpass.graph.sizes import hint_numel, is_size
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.torch_internals.collectives import group_size
from mstpass.torch_internals.graphs import OpCall, schema_of

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


# ---- traffic -------------------------------------------------------------------------------------
_BLOCK = 256  # queries that a thread computes in one go, of long sequences
# In the backward of a single head, the threads share its products instead: two took 1.64 times as
# long as for each of two heads (N=8192, d=64, fp32, torch 2.13, AMD EPYC, 2026-11-25).
_THREADS_OF_ONE_HEAD = 1.22


@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """The work of a fused attention.

    Attributes:
        operations: of all scores, whether a causal mask hides them or not.
        heads: of the whole batch, ``B * H``.
        queries: rows of one head.
        keys: the same.
        causal: scores that the mask hides are skipped.
        window: the most keys that a query reads; those outside of its window are skipped.
        efficient: torch's memory-efficient kernel computes it, the slowest one of a GPU.
    """

    operations: int
    dtype: torch.dtype
    heads: int
    queries: int
    keys: int
    causal: bool = False
    backward: bool = False
    window: int | None = None
    efficient: bool = False

    def of_group(self, num_groups: int) -> AttentionWork:
        """The work of one of several groups of heads, all of the same size."""
        operations, heads = self.operations // num_groups, max(1, self.heads // num_groups)
        return dataclasses.replace(self, operations=operations, heads=heads)

    @property
    def computed(self) -> float:
        """Operations without those for scores that the mask hides."""
        return self.operations * self._seen(self.queries) / max(1, self.queries * self.keys)

    def _seen(self, queries: int) -> float:
        """The scores of the first queries of a head, without those that the mask hides."""
        if self.window is not None:
            return float(queries * min(self.keys, self.window))
        if not self.causal:
            return float(queries * self.keys)
        first = min(queries, self.keys)
        return first**2 / 2 + (queries - first) * self.keys

    def imbalance(self, threads: int) -> float:
        """The time of the busiest of a CPU's threads, relative to equal shares."""
        if self.backward:
            if self.heads == 1:
                return max(1.0, threads / _THREADS_OF_ONE_HEAD)
            return ceil_div(self.heads, threads) * threads / max(1, self.heads)
        blocks = max(1, ceil_div(self.queries, _BLOCK))
        share = ceil_div(self.heads * blocks, threads)
        ends = (min(n * share, self.heads * blocks) for n in range(threads + 1))
        done = [self._done(end, blocks) for end in ends]
        return max(b - a for a, b in itertools.pairwise(done)) * threads / max(1.0, done[-1])

    def _done(self, units: int, blocks: int) -> float:
        """The same of the first blocks of queries, counted through all heads."""
        heads, rest = divmod(units, blocks)
        return heads * self._seen(self.queries) + self._seen(min(rest * _BLOCK, self.queries))


def attention_work(node: fx.Node) -> AttentionWork | None:
    """The work of a node; None for all ops but fused attention, and without sizes of heads.

    Two matmuls in the forward, five in the backward, each ``[S, D] @ [D, T]`` for every head.
    Symbolic sizes count with their hint (sizes.py).
    """
    attention = ops.attention_of(node)
    call = None if attention is None else call_of(node)
    sizes = None if call is None else attention_sizes(call)
    if attention is None or call is None or sizes is None or sizes.in_one_row:
        return None
    heads = sizes.B * sizes.H
    operations = (5 if sizes.backward else 2) * 2 * heads * sizes.S * sizes.T * sizes.D
    kind = bool(call.number("is_causal")), sizes.backward, _window(call), attention.efficient
    return AttentionWork(operations, sizes.dtype, heads, sizes.S, sizes.T, *kind)


def _window(call: OpCall) -> int | None:
    """The most keys that a query of flash attention with a window reads; None without one."""
    sides = [int(call.number(f"window_size_{side}", -1)) for side in ("left", "right")]
    return sum(sides) + 1 if min(sides) >= 0 else None


# ---- collectives ---------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class ExchangeWork:
    """The work of a collective.

    Attributes:
        sent_bytes: what a rank sends to all others together.
        ranks: of the group, neighbors in as few nodes as hold them.
        in_turn: ranks send to their neighbors alone. Otherwise each sends equal parts to all.
    """

    sent_bytes: float
    ranks: int
    in_turn: bool = True


def exchange_work(node: fx.Node) -> ExchangeWork | None:
    """The work of a node; None where it is no collective of a group that this process knows."""
    ranks = group_size(group_of(node)) if is_collective(node) else 0
    if ranks == 0:
        return None
    name = schema_of(node.target).name.partition("::")[2]  # type: ignore[arg-type]
    given = sum(map(nbytes, node.all_input_nodes))
    others = (ranks - 1) / ranks
    if "all_to_all" in name or "alltoall" in name:
        if _has_one_partner(node):
            return ExchangeWork(given, ranks)
        return ExchangeWork(given * others, ranks, in_turn=False)
    if name.startswith("all_gather"):
        return ExchangeWork(nbytes(node) * others, ranks)
    if name.startswith("reduce_scatter"):
        return ExchangeWork(given * others, ranks)
    if name.startswith("all_reduce"):
        return ExchangeWork(2 * given * others, ranks)
    return ExchangeWork(given, ranks)


def _has_one_partner(node: fx.Node) -> bool:
    sizes = argument(node, "input_split_sizes") if has_argument(node, "input_split_sizes") else ()
    return sum(size != 0 for size in sizes or ()) == 1
