"""Which values must not be reconstructed within an error, because backward compares them.

``relu`` gives exact zeros, and its gradient asks ``relu(x) <= 0``. A zero that is reconstructed as
1e-17 would let the gradient through: a small error of the value, a large one of the gradient. So it
is with every op that jumps, wherever values may lie on the jump. Sums and products spread values
over many numbers, and lie on a jump no more often than rounding puts them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.walk import walk_once


def is_compared(value: fx.Node) -> bool:
    """Whether an op that jumps reads the value, or what is computed from it element by element.

    That is by pointwise ops, views, and ops that move elements; in the bodies of loops as well.
    """
    handing_on = walk_once([value], lambda node: filter(_hands_on, _readers(node)))
    return any(_jumps(reader) for node in handing_on for reader in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a node; of a loop, the inputs of its body that are the node's chunks."""
    for user in node.users:
        if user.target is mst_loop:
            yield from _inputs_of_body(user, node)
        else:
            yield user


def _inputs_of_body(loop: fx.Node, operand: fx.Node) -> Iterator[fx.Node]:
    arguments: Any = loop.args
    name, num_chunks, _, _, _, sliced, whole = arguments
    body: Any = getattr(loop.graph.owning_module, str(name.target))
    inputs = body.graph.find_nodes(op="placeholder")[num_chunks is None :]
    for given, placeholder in zip((*sliced, *whole), inputs, strict=False):
        if given is operand:
            yield placeholder


def _hands_on(node: fx.Node) -> bool:
    if node.op == "placeholder" or ops.is_pointwise(node) or ops.is_cheap_view(node):
        return True
    return ops.row(node).kind == "index"


def _jumps(node: fx.Node) -> bool:
    """Whether the op jumps; of floats, results of other types always do."""
    if node.op != "call_function":
        return False
    if ops.row(node).jumps:
        return True
    value = value_of(node)
    floats = value is None or value.is_floating_point()
    return not floats and any(
        tensor.is_floating_point()
        for operand in node.all_input_nodes
        for tensor in tensors_of(operand.meta.get("val"))
    )
