"""Give operands that stand for whole sequences a row for each token.

An advantage ``[B, 1]`` times a ratio ``[B, S]`` broadcasts over a part of the token dims: a chunk
of flattened tokens cannot index it. Expanded to ``[B, S]``, a view, it is sliced like the rest.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.node_meta import policy_meta
from mstpass.graph.sizes import Size, generic_shape
from mstpass.graph.tokens import Refusal, Spec, broadcast_source
from mstpass.normalize.downstream import downstream

aten = torch.ops.aten


def expand_to_tokens(joint: JointGraph) -> tuple[JointGraph, frozenset[str]]:
    """A new joint graph with such operands expanded, and the names of their users.

    The same graph where there are none.
    """
    found = _partly_broadcast(joint)
    if not found:
        return joint, frozenset()
    new = joint.copy()
    builder = Builder(new.module.graph, fake_mode_of(new.nodes))
    sizes = SizeNodes(builder)
    for node in new.module.graph.find_nodes(op="placeholder"):
        sizes.learn(node)
    for user_name, operand_name, spec in found:
        user, operand = new.by_name[user_name], new.by_name[operand_name]
        with new.module.graph.inserting_before(user):
            shape = _spread_shape(user.meta["val"].shape, operand.meta["val"].shape, spec)
            with contextlib.suppress(UnknownSize):
                arguments = sizes.arguments(shape)
                spread = builder.call(aten.expand.default, operand, arguments)
                spread.meta.update(policy_meta(user))
                user.replace_input_with(operand, spread)
    new.module.graph.lint()
    new.module.recompile()
    return JointGraph(new.module, new.num_fwd_outputs), frozenset(name for name, _, _ in found)


def _partly_broadcast(joint: JointGraph) -> list[tuple[str, str, Spec]]:
    """Pointwise users downstream of wide matmuls, such operands of theirs, the users' specs."""
    return [
        (node.name, operand.name, spec)
        for node, (spec, _) in joint.cached(downstream).items()
        if ops.is_pointwise(node)
        for operand in _partial_operands(node, spec)
    ]


def _partial_operands(node: fx.Node, spec: Spec) -> list[fx.Node]:
    shape = generic_shape(node.meta["val"])
    return [
        operand
        for operand in node.all_input_nodes
        if (value := value_of(operand)) is not None
        and isinstance(broadcast_source(generic_shape(value), shape, spec), Refusal)
    ]


def _spread_shape(out: torch.Size, operand: torch.Size, spec: Spec) -> list[Size]:
    own = [1] * (len(out) - len(operand)) + list(operand)
    return [out[dim] if dim in spec else size for dim, size in enumerate(own)]
