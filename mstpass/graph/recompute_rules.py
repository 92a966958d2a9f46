"""Which ops are slow to recompute in backward (*heavy*), and which must not be (*pinned*).

heavy    matmuls, attention, loops, and every op that the op table does not know
pinned   ops whose second run may give other results: random draws, sorts and writes by index (ties
         may fall otherwise), collectives (graph/collectives.py), writes to operands, ops with an
         effect, and ops from outside of PyTorch that have no row in the op table

A pinned op is heavy, too. Ops that make opaque values, such as the process group of a mesh, are
neither.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import value_of
from mstpass.graph.op_rows.row import CHEAP, PINNED
from mstpass.graph.op_table import may_draw
from mstpass.graph.token_rules.arguments import argument, has_argument
from mstpass.torch_internals.graphs import is_opaque
from mstpass.walk import walk_once

aten = torch.ops.aten
_EXTREMA = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)


def is_heavy(node: fx.Node) -> bool:
    """Whether the op is slow to recompute."""
    if node.op != "call_function" or is_opaque(node):
        return False
    return ops.row(node).repeats != CHEAP or draws_random_numbers(node)


def is_pinned(node: fx.Node) -> bool:
    """Whether backward must not recompute the op.

    Loops are not pinned: the mode of their region says whether they may run again.
    """
    if node.op != "call_function" or is_opaque(node):
        return False
    return ops.row(node).repeats == PINNED or draws_random_numbers(node)


def has_effect(node: fx.Node) -> bool:
    """Whether the op runs for its effect: ``with_effects(token, op, ...) -> (token, *results)``.

    Tokens, tensors without elements, hold such ops in their order.
    """
    return node.target is torch.ops.higher_order.with_effects


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the op reads or advances a random state.

    Attention is tagged as random but does so only if its dropout is not 0.
    """
    if not may_draw(node.target):
        return False
    if has_argument(node, "dropout_p"):
        return bool(argument(node, "dropout_p") != 0.0)
    return True


def compared(node: fx.Node) -> set[fx.Node]:
    """A maximum, its views, the flags of values that equal it, and how many these are.

    Values that are computed again in another form may differ from it in their last bits. Nothing if
    there are no such flags.
    """
    if node.target not in _EXTREMA:
        return set()
    found = {*walk_once([node], lambda one: filter(_shows, one.users))}
    return found if any(one.target is aten.eq.Tensor for one in found) else set()


def _shows(user: fx.Node) -> bool:
    if user.target is aten.eq.Tensor or ops.is_view(user) or ops.is_copy(user):
        return True
    values = list(map(value_of, user.all_input_nodes))
    return all(value is not None and value.dtype == torch.bool for value in values)
