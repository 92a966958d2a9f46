"""Give attention's backward zeros in place of a random generator's state that it does not read.

Some attention ops return, besides their result, the state of the generator from which their forward
drew its dropout; the backward draws the same numbers from it. Without dropout nobody reads it. It
has no heads, so a loop over heads could neither slice nor stack it.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.attention import held_by_item, is_attention, is_attention_item
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten
from mstpass.graph.sizes import is_static
from mstpass.graph.token_rules.arguments import argument

aten = torch.ops.aten


def unused_random_state(joint: JointGraph) -> Rewritten:
    """Replace the state that backwards of attention without dropout are given, in a copy.

    Returns:
        The copy and the names of the backwards in it that read zeros now; the graph itself if there
        is no such state.
    """
    if not any(_is_unused_state(node) for node in joint.nodes):
        return joint, frozenset()
    rewriting = Rewriting(joint)
    readers: set[str] = set()
    for node in rewriting.joint.nodes:
        value = value_of(node)
        if value is not None and _is_unused_state(node):
            with rewriting.graph.inserting_before(node.next):
                kind = {"dtype": value.dtype, "device": value.device}
                zero = rewriting.builder.call(aten.full.default, list(value.shape), 0, **kind)
            readers.update(user.name for user in node.users)
            rewriting.replace(node, zero)
    return rewriting.finished(), frozenset(readers)


def _is_unused_state(node: fx.Node) -> bool:
    """Whether only backwards of attention read the node, a state from which they do not draw."""
    if not is_attention_item(node) or held_by_item(node) is not None:
        return False
    value = value_of(node)
    readers = list(node.users)
    return (
        value is not None
        and is_static(value)
        and bool(readers)
        and all(is_attention(n) and argument(n, "dropout_p") == 0 for n in readers)
    )
