"""Which ops are slow to recompute in backward (*heavy*), and which must not be (*pinned*).

heavy    matmuls, attention, loops, and every op that the op table does not know
pinned   ops whose second run may give other results: random draws, sorts and writes by index (ties
         may fall otherwise), collectives (graph/collectives.py), writes to operands, and ops from
         outside of PyTorch

Ops that make opaque values, such as the process group of a mesh, are neither.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mstpass.graph import op_table, ops
from mstpass.graph.flex_attention import FLEX
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.graph.token_rules.matmul import MATMULS
from mstpass.graph.tokens import Refusal
from mstpass.torch_internals.graphs import OpOverload, is_opaque, schema_of

# Inductor's random numbers are a function of a seed, which is a value of the graph, and of their
# position. They are pinned although a second run would give the same numbers.
_RANDOM_OF_A_SEED = frozenset({"prims::inductor_random", "prims::inductor_randint"})
_KINDS_WITH_TIES = frozenset({"sort", "write"})
# Not heavy, although the op table refuses them for some token dims.
_CHEAP = frozenset(
    {torch.ops.prims.iota.default, torch.ops.aten.arange.start_step, torch.ops.aten.index.Tensor}
)


def is_heavy(node: fx.Node) -> bool:
    """Whether the op is slow to recompute."""
    if node.op != "call_function" or node.target is operator.getitem or is_opaque(node):
        return False
    return _is_heavy_op(node.target) or is_pinned(node)


@functools.cache
def _is_heavy_op(target: Any) -> bool:
    if target is mst_loop or target in MATMULS:
        return True
    return target not in _CHEAP and isinstance(ops.row_of(target), Refusal)


def is_pinned(node: fx.Node) -> bool:
    """Whether backward must not recompute the op.

    Loops are not pinned: the mode of their region says whether they may run again.
    """
    if node.op != "call_function" or node.target is operator.getitem or node.target is mst_loop:
        return False
    if is_opaque(node):
        return False
    return _is_pinned_op(node.target) or draws_random_numbers(node)


@functools.cache
def _is_pinned_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return target not in FLEX
    if schema_of(target).name in _RANDOM_OF_A_SEED:
        return True
    row = ops.row_of(target)
    if isinstance(row, op_table.Op) and row.kind in _KINDS_WITH_TIES:
        return True
    return schema_of(target).is_mutable or target.namespace not in ("aten", "prims")


@functools.cache
def _is_seeded_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the op reads or advances a random state.

    Attention is tagged as random but does so only if its dropout is not 0.
    """
    if not _is_seeded_op(node.target):
        return False
    if has_argument(node, "dropout_p"):
        return bool(argument(node, "dropout_p") != 0.0)
    return True
