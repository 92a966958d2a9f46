"""Slices and concatenations along the dim that holds heads or features.

A dim may hold several *rounds* of them, such as the two of a gate and an up projection in one
product: ``[N, 2 * l]`` are two rounds of l features. What takes or puts whole rounds keeps the
features apart::

    slice(x, dim, 0, l)           [N, 2 * l] -> [N, l]
    cat([dgate, dup], dim)        [N, l], [N, l] -> [N, 2 * l]
    slice_scatter(zeros, dgate, dim, 0, l)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.sizes import generic
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.arguments import argument, tensor_inputs
from mstpass.graph.tokens import Refusal, Spec

aten = torch.ops.aten
_SLICES = (aten.slice.Tensor, aten.slice_scatter.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_OPS = (aten.cat.default, *_SLICES, *_SPLITS)
PARTS = "a part of a dim does not hold whole rounds of heads"


def works_along(node: fx.Node, dim: int) -> bool:
    """Whether the node takes or puts parts of this dim of its result."""
    return node.target in _OPS and dim == argument(node, "dim") % _rank(node)


def part_sizes(node: fx.Node, dim: int) -> list[int]:
    """The sizes of the parts that the node takes or puts along the dim; of other nodes none."""
    if not works_along(node, dim):
        return []
    values = [*tensors_of(node.meta["val"]), *map(value_of, tensor_inputs(node))]
    sizes = [generic(value.shape[dim]) for value in values if value is not None]
    return [*sizes, *(_bounds(node, dim) if node.target in _SLICES else [])]


def operand_specs(node: fx.Node, held: Spec, count: int) -> OperandSpecs | Refusal:
    """Where the operands hold ``count`` heads for the result to hold them in ``held``.

    Operands and result hold them in the same dim, with the same number of elements in a row.
    """
    dim, inner = held
    strided = node.target in _SLICES and argument(node, "step") != 1
    if strided or any(size % (count * inner) for size in part_sizes(node, dim)):
        return Refusal(PARTS)
    return dict.fromkeys(tensor_inputs(node), held)


def chunk_arguments(
    node: fx.Node, args: tuple[Any, ...], held: Spec, count: int, length: int
) -> tuple[Any, ...]:
    """The arguments for a chunk of ``length`` of the ``count`` heads."""
    dim = held[0]
    if node.target is aten.cat.default or not works_along(node, dim):
        return args
    if node.target in _SPLITS:
        sizes = [value.shape[dim] // count * length for value in tensors_of(node.meta["val"])]
        return (args[0], sizes if node.target is aten.split_with_sizes.default else sizes[0], dim)
    start, stop = (bound // count * length for bound in _bounds(node, dim))
    operands = args[: len(tensor_inputs(node))]
    return (*operands, dim, start, stop)


def _bounds(node: fx.Node, dim: int) -> list[int]:
    """First and last element, exclusive, of the part that a slice takes or puts."""
    value = value_of(tensor_inputs(node)[0])
    assert value is not None, "the op gives one tensor"
    whole = generic(value.shape[dim])
    given = (argument(node, "start"), argument(node, "end"))
    start, stop = (_place(bound, whole) for bound in given)
    return [start or 0, whole if stop is None else stop]


def _place(bound: Any, whole: int) -> int | None:
    """A bound counted from the first element; negative ones count from the end."""
    if bound is None:
        return None
    number = generic(bound.meta["val"] if isinstance(bound, fx.Node) else bound)
    return int(min(whole, max(0, number + whole if number < 0 else number)))


def _rank(node: fx.Node) -> int:
    return next(tensors_of(node.meta["val"])).dim()
