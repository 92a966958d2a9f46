"""Values that consist of parts along one dim, and where their parts flow (see unstack.py).

A part is some of the *heads* of a dim (graph/heads.py): one, or several where parts differ in size.
How they pass through ops, views included, is as heads do, and a ``HeadDim`` says where a value has
them. Some ops show single parts, or write them::

    lengths (2, 3), HeadDim(0, 1), 5 rows:    rows 0 and 1 are the first part, 2, 3 and 4 the second
    lengths (1, 1), HeadDim(0, 2), 4 rows:    rows 0 and 1, and 2 and 3
    lengths (1, 1), HeadDim(0, 1), 4 rows:    they take turns: rows 0 and 2, and 1 and 3
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.axes import Axis
from mstpass.graph.heads import HeadAxis, HeadDim, works_along
from mstpass.graph.joint import JointGraph, descendants, numel, value_of
from mstpass.graph.linearity import is_zero
from mstpass.graph.sizes import Size, generic
from mstpass.graph.token_rules.arguments import dims_of, shape_of
from mstpass.graph.tokens import WHOLE, CannotTake, Reduced, Refusal, Spec
from mstpass.normalize.partial import (
    TAKERS,
    downstream,
    is_scatter,
    rows_taken,
    scattered_source,
    source_or_result,
)
from mstpass.walk import walk_once

aten = torch.ops.aten
CATS = (aten.cat.default, aten.stack.default)
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a dim is divided, into parts of so many heads each; a ``HeadDim`` says where they are.

    Attributes:
        rest: the numbers of parts that cannot be computed: values are used only where they are 0.
    """

    lengths: tuple[int, ...] = ()
    rest: ClassVar[frozenset[int]] = frozenset()

    @property
    def numbers(self) -> frozenset[int]:
        return self.rest | set(range(len(self.lengths) or 1))  # of chosen tokens, one is computed

    @staticmethod
    def of_sizes(dim: int, sizes: Sequence[Size]) -> tuple[HeadDim, Parts]:
        """Parts of these sizes, one after the other."""
        each = list(map(generic, sizes))
        inner = math.gcd(*each)
        return HeadDim(dim, inner), Parts(tuple(size // inner for size in each))

    @property
    def axis(self) -> Axis:
        """Along which values have their parts."""
        return HeadAxis(sum(self.lengths))

    def bounds(self, number: int) -> tuple[int, int]:
        """The first head of a part, and the first one behind it."""
        start = sum(self.lengths[:number])
        return start, start + self.lengths[number]

    def picked(self, node: fx.Node, held: Spec) -> int | None:
        """The number of the part that a ``select`` or ``slice`` takes; None if it takes none."""
        return None if is_scatter(node) else self._part_at(node, held)

    def written(self, node: fx.Node, held: Spec) -> dict[int, fx.Node] | None:
        """The parts that an op writes side by side, or into zeros; None if it writes no parts."""
        if node.target in CATS:
            pieces: Any = node.args[0]
            return dict(enumerate(pieces)) if parts_of_cat(node) == (held, self) else None
        into_zeros = is_scatter(node) and is_zero(node.args[0])
        number = self._part_at(node, held) if into_zeros else None
        return None if number is None else {number: scattered_source(node)}

    def _part_at(self, node: fx.Node, held: Spec) -> int | None:
        """The number of the part that an op takes or writes."""
        (where, inner), (dim, rows) = held, rows_taken(node) or (None, range(0))
        if dim != where or not rows:
            return None
        size, numbers = shape_of(source_or_result(node))[dim], range(len(self.lengths))
        return next((n for n in numbers if rows == self._rows(n, inner, size)), None)

    def _rows(self, number: int, inner: int, size: int) -> range | None:
        """The rows of a part in a dim of this size; None if they are no range."""
        (start, stop), whole = self.bounds(number), sum(self.lengths) * inner
        if size == whole:
            return range(start * inner, stop * inner)
        takes_turns = stop - start == inner == 1 and size % whole == 0
        return range(start, size, whole) if takes_turns else None


class PartsFlow:
    """Where the parts of one value go, such as a ``cat`` or a product that is divided.

    Attributes:
        parts: how values are divided; ``held``: where each one that is computed part by part has
            its parts; ``zero``: the numbers of the parts that are 0.
        picks: the nodes that take one part, with its number.
        combined: reductions over the parts, and products that sum over them, and what they do.
        narrow: values that are not wide, whatever their size: a weight's gradient.
        gradients: where gradients with parts may be written: of a product its own alone.

    Args:
        first: where the value has its parts.
        is_product: it is a product that is divided.

    Raises:
        CannotTake: nothing would be gained.
    """

    def __init__(
        self,
        joint: JointGraph,
        whole: fx.Node,
        wide_numel: float,
        first: Spec,
        parts: Parts,
        is_product: bool = False,
    ):
        self.joint, self.whole, self.wide_numel = joint, whole, wide_numel
        self.is_product, self.parts, self.axis = is_product, parts, parts.axis
        self.held, self.zero = {whole: first}, dict[fx.Node, frozenset[int]]()
        self.picks: dict[fx.Node, int] = {}
        self.combined: dict[fx.Node, Reduced] = {}
        self.narrow, self.gradients = frozenset[fx.Node](), frozenset(joint.backward)
        if is_product:
            of_weight = _gradients_of_weight(joint, whole)
            self.narrow = frozenset(descendants(of_weight) - {joint.output})
            self.gradients = frozenset(_made_into(of_weight))
        self._follow()
        if whole.target in CATS:
            self._check_gain()
        self._keep_wide()

    def is_wide(self, node: fx.Node) -> bool:
        return numel(node) >= self.wide_numel and node not in self.narrow

    def zero_in(self, number: int, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Which of the values are 0 in a part."""
        return {node for node in nodes if number in self.zero.get(node, ())}

    def _follow(self) -> None:
        """Note the parts of all values that have them, and what reads single parts or combines."""
        for node in self.joint.nodes[self.joint.index[self.whole] + 1 :]:
            if node.op != "call_function" or value_of(node) is None:
                continue
            found = self._scattered(node)
            self._note_source(node)
            operand = next((n for n in node.all_input_nodes if n in self.held), None)
            if found is None and operand is not None:
                found = self._after(node, operand)
            if found is not None:
                self.held[node] = found

    def _scattered(self, node: fx.Node) -> Spec | None:
        """Where a gradient has its parts that is written as a value with parts is divided."""
        for held in dict.fromkeys(self.held.values()) if node in self.gradients else ():
            if written := self.parts.written(node, held):
                self.zero[node] = self.parts.numbers - written.keys()
                return held
        return None

    def _note_source(self, node: fx.Node) -> None:
        """Note the parts of a value that only nodes that take single parts of it read.

        The gradient of a mean over a stack is such a value: one part, expanded.
        """
        sources = node.all_input_nodes
        if node.target not in TAKERS or sources[0] in self.held or not self.is_wide(sources[0]):
            return
        shape, picked = shape_of(sources[0]), self.parts.picked
        for known, held in list(self.held.items()):
            if shape_of(known) == shape and picked(node, held) is not None:
                if all(picked(user, held) is not None for user in sources[0].users):
                    self.held[sources[0]] = held
                return

    def _after(self, node: fx.Node, operand: fx.Node) -> Spec | None:
        held = self.held[operand]
        number = self.parts.picked(node, held)
        if number is not None:
            self.picks[node] = number
            return None
        if works_along(node, held[0]):
            return None
        result = self.axis.result_spec(node, operand, held)
        if isinstance(result, Reduced) and self._combines(node, operand):
            self.combined[node] = result
        if isinstance(result, Reduced | Refusal) or result == WHOLE:
            return None
        needs = self.axis.operand_specs(node, result)
        operands = [n for n in node.all_input_nodes if n in self.held]
        if isinstance(needs, Refusal) or any(needs.get(n) != self.held[n] for n in operands):
            return None
        zero = {p: nodes for p in self.parts.numbers if (nodes := self.zero_in(p, operands))}
        stay = {p for p, nodes in zero.items() if ops.row(node).linear(node, nodes)}
        if not self.parts.rest & zero.keys() <= stay:
            return None
        self.zero[node] = frozenset(stay)
        return result

    def _combines(self, node: fx.Node, operand: fx.Node) -> bool:
        if ops.is_reduction(node):
            return not self.is_product or self.is_wide(operand) or not _is_low(operand)
        several = not self.is_product and not self.parts.rest
        return ops.is_matmul(node) and not (several and _is_low(node))

    def _check_gain(self) -> None:
        """Check that the parts come apart along their tokens, or are taken apart again.

        Raises:
            CannotTake: a loop over tokens may as well hold all of them.
        """
        known = self.joint.cached(downstream)
        dim, pieces = self.held[self.whole][0], self.whole.args[0]
        along_tokens = any(dim in known[piece][0] for piece in pieces if piece in known)  # type: ignore
        wide_sums = any(map(self._reads_wide, self.combined))
        if not along_tokens and (not self.picks or wide_sums):
            raise CannotTake(self.whole, "its parts are not taken apart again")

    def _reads_wide(self, node: fx.Node) -> bool:
        return any(n in self.held and self.is_wide(n) for n in node.all_input_nodes)

    def _keep_wide(self) -> None:
        """Keep the values to compute part by part: the wide ones, and those that lead to these."""
        wide = (node for node in self.held if self.is_wide(node) or self._reads_wide(node))
        operands = lambda node: (n for n in node.all_input_nodes if n in self.held)
        kept = set(walk_once(wide, operands))
        ends = {user for node in kept for user in node.users}
        self.held = {node: held for node, held in self.held.items() if node in kept}
        self.picks = {node: number for node, number in self.picks.items() if node in ends}
        self.combined = {node: how for node, how in self.combined.items() if node in ends}


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


def parts_of_cat(cat: fx.Node) -> tuple[HeadDim, Parts]:
    pieces: Any = cat.args[0]
    (dim,) = dims_of(cat, len(shape_of(cat)), "dim")
    if cat.target is aten.stack.default:
        return HeadDim(dim), Parts((1,) * len(pieces))
    return Parts.of_sizes(dim, [piece.meta["val"].shape[dim] for piece in pieces])
