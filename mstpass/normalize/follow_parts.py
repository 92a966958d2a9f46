"""Follow the parts of a concatenation, or of a product, through the graph (see unstack.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, descendants, numel, value_of
from mstpass.graph.sizes import generic
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import dims_of, shape_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal
from mstpass.normalize.downstream import downstream
from mstpass.normalize.parts import (
    WRITERS,
    Parts,
    parts_after_view,
    picked,
    written_parts,
)
from mstpass.normalize.token_window import TAKERS
from mstpass.walk import walk_once

aten = torch.ops.aten
LOW_PRECISION = (torch.bfloat16, torch.float16)
COMBINED: Mapping[Any, Any] = {  # a reduction: the op that combines the results of two parts
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.sum.default: aten.add.Tensor,
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
    aten.any.dim: aten.logical_or.default,
    aten.any.dims: aten.logical_or.default,
    aten.mean.dim: aten.add.Tensor,
}
MEANS = (aten.mean.dim,)


@dataclasses.dataclass(frozen=True)
class PartsFlow:
    """Where the parts of a concatenation or of a product are.

    Attributes:
        parts: the parts of each value that is computed part by part.
        picks: the nodes that take one part, with its number.
        combined: reductions over the parts, and products that sum over them.
        narrow: values that are not wide, whatever their size: a weight's gradient.
    """

    parts: Mapping[fx.Node, Parts]
    picks: Mapping[fx.Node, int]
    combined: frozenset[fx.Node]
    narrow: frozenset[fx.Node]


def follow_parts(
    joint: JointGraph, whole: fx.Node, wide_numel: float, parts: Parts | None = None
) -> PartsFlow:
    """Follow the parts of a ``cat`` or ``stack`` node, or those into which a product is divided.

    Args:
        parts: those of a product.

    Raises:
        CannotTake: nothing would be gained.
    """
    follower = _Follower(joint, whole, wide_numel, parts)
    follower.follow()
    if parts is None:
        follower.check_gain()
    return follower.found()


class _Follower:
    def __init__(
        self, joint: JointGraph, whole: fx.Node, wide_numel: float, parts: Parts | None = None
    ):
        self.joint, self.cat, self.wide_numel = joint, whole, wide_numel
        self.is_product = parts is not None
        self.parts = {whole: parts or _parts_of_cat(whole)}
        self.picks: dict[fx.Node, int] = {}
        self.combined: frozenset[fx.Node] = frozenset()
        self.narrow = _gradients_of_weight(joint, whole) if self.is_product else frozenset()

    def _wide(self, node: fx.Node) -> bool:
        return numel(node) >= self.wide_numel and node not in self.narrow

    def follow(self) -> None:
        """Note the parts of all values that have them, and what reads single parts or combines."""
        for node in self.joint.nodes[self.joint.index[self.cat] + 1 :]:
            if node.op != "call_function" or value_of(node) is None:
                continue
            found = self._scattered(node)
            self._note_source(node)
            operand = next((n for n in node.all_input_nodes if n in self.parts), None)
            if found is None and operand is not None:
                found = self._after(node, operand)
            if found is not None:
                self.parts[node] = found

    def _scattered(self, node: fx.Node) -> Parts | None:
        """The parts of a gradient whose shape is that of a value with parts."""
        if node.target not in WRITERS:
            return None
        known = {(p.dim, tuple(map(generic, p.sizes))): p for p in self.parts.values()}
        found = (parts for parts in known.values() if written_parts(node, parts) is not None)
        return next(found, None)

    def _note_source(self, node: fx.Node) -> None:
        """Note the parts of a value that only nodes that take single parts of it read.

        The gradient of a mean over a stack is such a value: one part, expanded.
        """
        sources = node.all_input_nodes
        if node.target not in TAKERS or sources[0] in self.parts or not self._wide(sources[0]):
            return
        shape = shape_of(sources[0])
        for known, parts in list(self.parts.items()):
            if shape_of(known) == shape and picked(node, parts) is not None:
                if all(picked(user, parts) is not None for user in sources[0].users):
                    self.parts[sources[0]] = parts
                return

    def _after(self, node: fx.Node, operand: fx.Node) -> Parts | None:
        parts = self.parts[operand]
        number = picked(node, parts)
        if number is not None:
            self.picks[node] = number
            return None
        if ops.is_reshape(node):
            return parts_after_view(value_of(operand), value_of(node), parts)
        if ops.is_reduction(node) and parts.dim in reduced_dims(node, len(shape_of(operand))):
            if not self.is_product or self._wide(operand) or not _is_low(operand):
                self._combine(node)
            return None
        result = ops.result_spec(node, operand, (parts.dim,))
        if result == SUM and ops.is_matmul(node):
            self._combine(node)
        if not isinstance(result, tuple) or len(result) != 1:
            return None
        needs = ops.operand_specs(node, result)
        if isinstance(needs, Refusal):
            return None
        others = [n for n in node.all_input_nodes if n in self.parts]
        if all(needs.get(n) == (self.parts[n].dim,) and parts.fits(self.parts[n]) for n in others):
            return dataclasses.replace(parts, dim=result[0])
        return None

    def _combine(self, node: fx.Node) -> None:
        low = _is_low(node) and not self.is_product
        if node.target in COMBINED or (ops.is_matmul(node) and not low):
            self.combined |= {node}

    def check_gain(self) -> None:
        """Check that the parts come apart along their tokens, or are taken apart again.

        Raises:
            CannotTake: a loop over tokens may as well hold all of them.
        """
        known = self.joint.cached(downstream)
        dim = self.parts[self.cat].dim
        pieces: Any = self.cat.args[0]
        along_tokens = any(dim in known[piece][0] for piece in pieces if piece in known)
        wide_sums = any(map(self._reads_wide, self.combined))
        if not along_tokens and (not self.picks or wide_sums):
            raise CannotTake(self.cat, "its parts are not taken apart again")

    def _reads_wide(self, node: fx.Node) -> bool:
        return any(n in self.parts and self._wide(n) for n in node.all_input_nodes)

    def found(self) -> PartsFlow:
        """The values to compute part by part: the wide ones, and those that lead to these."""
        wide = (node for node in self.parts if self._wide(node) or self._reads_wide(node))
        operands = lambda node: (n for n in node.all_input_nodes if n in self.parts)
        kept = set(walk_once(wide, operands))
        ends = {user for node in kept for user in node.users}
        return PartsFlow(
            {node: parts for node, parts in self.parts.items() if node in kept},
            {node: number for node, number in self.picks.items() if node in ends},
            self.combined & ends,
            self.narrow,
        )


def _is_low(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype in LOW_PRECISION


def _gradients_of_weight(joint: JointGraph, product: fx.Node) -> frozenset[fx.Node]:
    """The products of the backward that share the tokens with a product, and what they lead to."""
    needs = ops.operand_specs(product, joint.cached(downstream)[product][0])
    if isinstance(needs, Refusal):
        raise CannotTake(product, needs.reason)
    (tokens,) = (ops.base_of(n) for n in ops.matmul_factors(product) if needs[n] != WHOLE)
    products = filter(ops.is_matmul, joint.backward)
    sharing = (n for n in products if tokens in map(ops.base_of, ops.matmul_factors(n)))
    return frozenset(descendants(sharing) - {joint.output})


def _parts_of_cat(cat: fx.Node) -> Parts:
    pieces: Any = cat.args[0]
    (dim,) = dims_of(cat, len(shape_of(cat)), "dim")
    if cat.target is aten.stack.default:
        return Parts(dim, (1,) * len(pieces))
    return Parts(dim, tuple(piece.meta["val"].shape[dim] for piece in pieces))
