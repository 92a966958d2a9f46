"""The arguments and shapes of a node, as the token rules read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of
from mstpass.graph.sizes import generic_shape
from mstpass.torch_internals.graphs import OpOverload, schema_of


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of the node's tensor, or of the first one if the op returns several.

    Symbolic sizes are replaced by their values at the generic point (sizes.py).
    """
    return generic_shape(next(tensors_of(node.meta.get("val"))))


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The operands that hold a tensor: all but sizes."""
    return [n for n in node.all_input_nodes if any(True for _ in tensors_of(n.meta.get("val")))]


def nodes_at(node: fx.Node, *positions: int) -> list[fx.Node]:
    """The arguments at these positions, which are nodes."""
    found = [node.args[position] for position in positions]
    nodes = [argument for argument in found if isinstance(argument, fx.Node)]
    assert len(nodes) == len(found), "the arguments are nodes"
    return nodes


def argument(node: fx.Node, name: str) -> Any:
    """The argument with this name in the op's schema, or its default if it was not passed.

    Raises:
        LookupError: the op has no such argument.
    """
    assert isinstance(node.target, OpOverload), "the target is an op"
    for position, known in enumerate(schema_of(node.target).arguments):
        if known.name == name:
            given = node.args[position] if position < len(node.args) else known.default_value
            return node.kwargs.get(name, given)
    raise LookupError(f"{node.target} has no argument {name}")


def has_argument(node: fx.Node, name: str) -> bool:
    assert isinstance(node.target, OpOverload), "the target is an op"
    return any(known.name == name for known in schema_of(node.target).arguments)


def ints(argument: Any) -> list[int]:
    """The elements of an argument that is a list of ints."""
    assert isinstance(argument, tuple | list), "the argument is a list"
    assert all(isinstance(d, int) for d in argument), "the list is of numbers"
    return list(argument)


def dims_of(node: fx.Node, rank: int, name: str) -> list[int]:
    """The dims in an argument, counted from the left; all ``rank`` dims if it is None or empty."""
    dims = argument(node, name)
    if dims is None or dims == []:
        return list(range(rank))
    return [d % max(1, rank) for d in ints([dims] if isinstance(dims, int) else dims)]
