"""Values that consist of parts along one dim, and where their parts flow (see unstack.py).

Some ops show single parts, or write them:

sizes (2, 3) along dim 0:                rows 0 and 1 are the first part, 2, 3 and 4 the second
sizes (2, 2) along dim 0, interleaved:   rows 0 and 2 are the first part, 1 and 3 the second
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, descendants, numel, value_of
from mstpass.graph.linearity import is_zero
from mstpass.graph.sizes import Size, generic, generic_shape
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import dims_of, shape_of
from mstpass.graph.tokens import SUM, WHOLE, CannotTake, Refusal, group_of
from mstpass.normalize.token_window import (
    SCATTERS,
    TAKERS,
    downstream,
    rows_taken,
    scattered_source,
)
from mstpass.walk import walk_once

aten = torch.ops.aten
WRITERS = (aten.cat.default, *SCATTERS)
LOW_PRECISION = (torch.bfloat16, torch.float16)
MEANS = (aten.mean.dim,)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The dim along which a value consists of parts, and their sizes there.

    Attributes:
        interleaved: the parts take turns, row by row; they have the same size.
    """

    dim: int
    sizes: tuple[Size, ...]
    interleaved: bool = False

    def bounds(self, number: int) -> tuple[Size, Size, int]:
        """Where a part begins and ends, and the step from one of its rows to the next."""
        if self.interleaved:
            whole: Any = sum(self.sizes)
            return number, whole, len(self.sizes)
        start: Any = sum(self.sizes[:number])
        return start, start + self.sizes[number], 1

    def number_of(self, rows: range) -> int | None:
        """The part with these rows at the generic point (graph/sizes.py)."""
        for number in range(len(self.sizes)):
            if rows.start < rows.stop and rows == range(*map(generic, self.bounds(number))):
                return number
        return None

    def fits(self, other: Parts) -> bool:
        """Whether both have parts of the same sizes, in the same order."""
        same_sizes = list(map(generic, self.sizes)) == list(map(generic, other.sizes))
        return same_sizes and self.interleaved == other.interleaved


def parts_after_view(
    source: torch.Tensor | None, result: torch.Tensor | None, parts: Parts
) -> Parts | None:
    """The parts of a view; None if it does not keep them together.

    ``[k n, V] -> [k, n, V]`` turns parts of n rows into parts of size 1, and back. ``[n, k, V] ->
    [n k, V]`` and ``[n, k V] -> [n k, V]`` make parts that lie in a row interleaved, and back.
    """
    assert source is not None and result is not None, "the source and result are known"
    shape, new = generic_shape(source), generic_shape(result)
    ins, outs = group_of(shape, new, parts.dim)
    if not outs:
        return None
    if parts.interleaved:
        return _apart(source, result, ins, outs, parts)
    if ins[0] != parts.dim:
        return _interleaved(source, result, ins, outs, parts)
    inner = math.prod(shape[d] for d in ins[1:])
    inner_of_result = math.prod(new[d] for d in outs[1:])
    times: Any = math.prod(source.shape[d] for d in ins[1:])
    by: Any = math.prod(result.shape[d] for d in outs[1:])
    sizes: list[Size] = []
    for size in parts.sizes:
        elements = generic(size) * inner
        if elements % inner_of_result:
            return None
        whole: Any = size * times
        sizes.append(whole if inner_of_result == 1 else _quotient(whole, by))
    return Parts(outs[0], tuple(sizes))


def _interleaved(
    source: torch.Tensor, result: torch.Tensor, ins: list[int], outs: list[int], parts: Parts
) -> Parts | None:
    """The parts of an inner dim, once a view moves their number to the dims outside of it."""
    if ins[-1] != parts.dim or len(outs) > 2:
        return None
    width = generic(result.shape[outs[-1]]) if len(outs) == 2 else 1
    if set(map(generic, parts.sizes)) != {width}:
        return None
    rows: Any = math.prod(source.shape[d] for d in ins[:-1])
    return Parts(outs[0], (rows,) * len(parts.sizes), interleaved=True)


def _apart(
    source: torch.Tensor, result: torch.Tensor, ins: list[int], outs: list[int], parts: Parts
) -> Parts | None:
    """Interleaved parts after a view: they stay so, or are in an inner dim, one after the other."""
    if ins[0] != parts.dim or len(ins) > 2:
        return None
    if len(ins) == len(outs) == 1:
        return dataclasses.replace(parts, dim=outs[0])
    width: Any = source.shape[ins[1]] if len(ins) == 2 else 1
    count = len(parts.sizes)
    if generic(result.shape[outs[-1]]) != count * generic(width):
        return None
    return Parts(outs[-1], (width,) * count)


def _quotient(size: Size, by: Size) -> Size:
    return 1 if generic(size) == generic(by) else size // by


def picked(node: fx.Node, parts: Parts) -> int | None:
    """The number of the part that a ``select`` or ``slice`` takes; None if it takes none."""
    return _part_at(node, parts) if node.target in TAKERS else None


def written_parts(node: fx.Node, parts: Parts) -> dict[int, fx.Node] | None:
    """The parts that an op writes side by side, or into zeros; None if it writes no parts."""
    if node.target not in WRITERS or sum(map(generic, parts.sizes)) != _size(node, parts.dim):
        return None
    if node.target is aten.cat.default:
        (dim,) = dims_of(node, len(shape_of(node)), "dim")
        pieces: Any = node.args[0]
        sizes = tuple(shape_of(piece)[dim] for piece in pieces) if dim == parts.dim else ()
        return dict(enumerate(pieces)) if Parts(dim, sizes).fits(parts) else None
    number = _part_at(node, parts) if is_zero(node.args[0]) else None
    return None if number is None else {number: scattered_source(node)}


def _size(node: fx.Node, dim: int) -> int | None:
    shape = shape_of(node)
    return shape[dim] if dim < len(shape) else None


def _part_at(node: fx.Node, parts: Parts) -> int | None:
    """The number of the part that an op takes or writes."""
    dim, rows = rows_taken(node) or (None, range(0))
    return parts.number_of(rows) if dim == parts.dim else None


COMBINED: Mapping[Any, Any] = {  # a reduction: the op that combines the results of two parts
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.sum.default: aten.add.Tensor,
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
    aten.any.dim: aten.logical_or.default,
    aten.any.dims: aten.logical_or.default,
    aten.mean.dim: aten.add.Tensor,
}


class PartsFlow:
    """Where the parts of a ``cat`` or ``stack`` node are, or those into which a product is divided.

    Attributes:
        parts: the parts of each value that is computed part by part.
        picks: the nodes that take one part, with its number.
        combined: reductions over the parts, and products that sum over them.
        narrow: values that are not wide, whatever their size: a weight's gradient.
        gradients: where gradients with parts may be written: of a product its own alone.

    Args:
        parts: those of a product.

    Raises:
        CannotTake: nothing would be gained.
    """

    def __init__(
        self, joint: JointGraph, whole: fx.Node, wide_numel: float, parts: Parts | None = None
    ):
        self.joint, self.cat, self.wide_numel = joint, whole, wide_numel
        self.is_product = parts is not None
        self.parts = {whole: parts or _parts_of_cat(whole)}
        self.picks: dict[fx.Node, int] = {}
        self.combined: set[fx.Node] = set()
        self.narrow, self.gradients = frozenset[fx.Node](), frozenset(joint.backward)
        if self.is_product:
            of_weight = _gradients_of_weight(joint, whole)
            self.narrow = frozenset(descendants(of_weight) - {joint.output})
            self.gradients = frozenset(_made_into(of_weight))
        self._follow()
        if not self.is_product:
            self._check_gain()
        self._keep_wide()

    def is_wide(self, node: fx.Node) -> bool:
        return numel(node) >= self.wide_numel and node not in self.narrow

    def _follow(self) -> None:
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
        if node.target not in WRITERS or node not in self.gradients:
            return None
        known = {(p.dim, tuple(map(generic, p.sizes))): p for p in self.parts.values()}
        found = (parts for parts in known.values() if written_parts(node, parts) is not None)
        return next(found, None)

    def _note_source(self, node: fx.Node) -> None:
        """Note the parts of a value that only nodes that take single parts of it read.

        The gradient of a mean over a stack is such a value: one part, expanded.
        """
        sources = node.all_input_nodes
        if node.target not in TAKERS or sources[0] in self.parts or not self.is_wide(sources[0]):
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
            if not self.is_product or self.is_wide(operand) or not _is_low(operand):
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
            self.combined.add(node)

    def _check_gain(self) -> None:
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
        return any(n in self.parts and self.is_wide(n) for n in node.all_input_nodes)

    def _keep_wide(self) -> None:
        """Keep the values to compute part by part: the wide ones, and those that lead to these."""
        wide = (node for node in self.parts if self.is_wide(node) or self._reads_wide(node))
        operands = lambda node: (n for n in node.all_input_nodes if n in self.parts)
        kept = set(walk_once(wide, operands))
        ends = {user for node in kept for user in node.users}
        self.parts = {node: parts for node, parts in self.parts.items() if node in kept}
        self.picks = {node: number for node, number in self.picks.items() if node in ends}
        self.combined &= ends


def _is_low(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype in LOW_PRECISION


def _gradients_of_weight(joint: JointGraph, product: fx.Node) -> list[fx.Node]:
    """The products of the backward that share the tokens with a product."""
    spec, _ = joint.cached(downstream).get(product, ((0,), product))
    needs = ops.operand_specs(product, spec)
    if isinstance(needs, Refusal):
        raise CannotTake(product, needs.reason)
    (tokens,) = (ops.base_of(n) for n in ops.matmul_factors(product) if needs[n] != WHOLE)
    products = filter(ops.is_matmul, joint.backward)
    return [n for n in products if tokens in map(ops.base_of, ops.matmul_factors(n))]


def _made_into(products: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """What products are computed from without another product: nothing of another layer."""
    operands = (operand for product in products for operand in product.all_input_nodes)
    return walk_once(operands, lambda n: [] if ops.is_matmul(n) else n.all_input_nodes)


def _parts_of_cat(cat: fx.Node) -> Parts:
    pieces: Any = cat.args[0]
    (dim,) = dims_of(cat, len(shape_of(cat)), "dim")
    if cat.target is aten.stack.default:
        return Parts(dim, (1,) * len(pieces))
    return Parts(dim, tuple(piece.meta["val"].shape[dim] for piece in pieces))
