"""Compute wide values that are stacked or concatenated part by part.

Several heads' logits are often stacked, worked on together and taken apart again. The stack would
exist whole, and a region would end at it. Written part by part it does not exist::

    select(cat(x_1, ..., x_k), i)  =  x_i
    f(cat(x_1, ..., x_k))          =  cat(f(x_1), ..., f(x_k))      f works along other dims only
    sum(cat(x_1, ..., x_k))        =  sum(x_1) + ... + sum(x_k)     maxima, minima, products alike

In the backward a gradient of the stack is known part by part as well: it is a ``cat``, or each part
is written into zeros, and a sum leaves out the parts that are zero. What is left is the graph of
heads that were never stacked, each of which becomes a region of its own, or, where a reduction runs
over the stack, one region of them all.

Terms:
    *parts*: of a value the dim along which it consists of parts, and their sizes.

An op *works on parts* if the op table treats its operand's dim of parts as it treats tokens. A
narrow value is taken apart if wide ones are computed from it; else its parts are put together.

Pseudo-code::

    for each concatenation of wide values along their tokens, or that is taken apart again:
        follow its parts through all ops that work on parts
        compute the wide values part by part; let the ops at the ends read the parts

A product of which only parts can be worked on in a loop is divided in the same way
(divided_products.py): it takes the place of the concatenation, and its parts are products.

Limits: the parts stay together if the whole of a wide value is needed, for example because the step
returns it. In low precision a product is divided into a sum of products for divided products only:
a loop adds the terms of a weight's gradient up in float32; those of the tokens' gradient are
rounded, as those of separate heads are, and added up in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.heads import HeadDim
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.linearity import is_zero
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated
from mstpass.graph.sizes import same_shape
from mstpass.graph.token_rules import OperandSpecs
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import CannotTake, Refusal, Spec
from mstpass.normalize.divided_products import Division, next_divisions
from mstpass.normalize.partial import Partial, downstream, replace_alike
from mstpass.normalize.parts import (
    CATS,
    COMBINED,
    LOW_PRECISION,
    MEANS,
    Parts,
    PartsFlow,
)
from mstpass.regions.anchors import WIDE_OF_ANCHOR

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_Whole = Callable[[fx.Node], fx.Node]
_NOT_SUMS = tuple(op for op, combine in COMBINED.items() if combine is not aten.add.Tensor)


def unstack(joint: JointGraph) -> Rewritten:
    """Compute such values part by part, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that were changed or made; the graph itself if there is
        no such value.
    """
    joint, of_cats = repeated(joint, _next_cat, lambda *cat: _Unstacker(*cat).unstack())
    joint, of_products = repeated(joint, next_divisions, divided)
    return joint, of_cats | of_products


def divided(joint: JointGraph, divisions: Sequence[Division]) -> tuple[JointGraph, set[str]]:
    """The graph in which all of these products are computed part by part.

    Raises:
        CannotTake, UnknownSize: one of them cannot.
    """
    changed: set[str] = set()
    for division in divisions:
        product = joint.by_name[division.product]
        wide_numel = WIDE_OF_ANCHOR * numel(product) / len(division.parts.lengths)
        parts = division.held, division.parts
        joint, names = _Unstacker(joint, (product, wide_numel), parts).unstack()
        changed |= names
    return joint, changed


def _next_cat(joint: JointGraph, tried: set[str]) -> tuple[list[str], tuple[fx.Node, float]] | None:
    """A concatenation of wide values that was not tried yet, and what is wide there."""
    known = joint.cached(downstream)
    for node in joint.nodes:
        if node.target not in CATS or node in joint.backward or node.name in tried:
            continue
        pieces: Any = node.args[0]
        anchors = [known[piece][1] for piece in pieces if piece in known]
        wide_numel = WIDE_OF_ANCHOR * min(map(numel, anchors), default=math.inf)
        if len(pieces) > 1 and all(numel(piece) >= wide_numel for piece in pieces):
            return [node.name], (node, wide_numel)
    return None


class _Part(Partial):
    """One part of the values that consist of parts."""

    def __init__(self, rewriting: Rewriting, flow: PartsFlow, number: int, whole: _Whole):
        super().__init__(rewriting, (), flow.axis, flow.parts.lengths[number])
        self.flow, self.number, self.put_together = flow, number, whole

    def is_given(self, node: fx.Node, spec: Spec) -> bool:
        flow, held = self.flow, HeadDim(*spec)
        if node in flow.held:
            if flow.held[node] != held:
                raise CannotTake(node, "has its parts in another dim")
            return flow.parts.written(node, held) is not None
        wide = flow.is_wide(node) or any(map(flow.is_wide, node.all_input_nodes))
        computed = wide or self._is_of_weight(node)
        return not computed or isinstance(self.axis.operand_specs(node, held), Refusal)

    def _is_of_weight(self, node: fx.Node) -> bool:
        """Whether a slice is taken where a weight enters the step."""
        return self.flow.is_product and node.op == "call_function" and ops.is_weight(node)

    def given(self, node: fx.Node, spec: Spec) -> fx.Node:
        """What is written, or zeros; a slice of a value of which nothing else is known."""
        if node in self.flow.held:
            written = self.flow.parts.written(node, HeadDim(*spec)) or {}
            if self.number not in written:
                return self.zeros(node, spec)
            return self.in_chunk_form(written[self.number], node, spec)
        shape, dim = self.axis.stacked(node.meta["val"].shape, spec)
        heads, bounds = self.sizes.reshaped(node, shape), self.flow.parts.bounds(self.number)
        part = self.builder.call(aten.slice.Tensor, heads, dim, *bounds)
        return self.in_chunk_form(part, node, spec)

    def compute(self, node: fx.Node, spec: Spec) -> fx.Node:
        parts = {n: self.known[n, s] for n, s in self._needed((node, spec))}
        zero = {n for n, part in parts.items() if n in self.flow.held and is_zero(part)}
        if zero and ops.row(node).linear(node, zero):  # 0 whatever the dtype
            return self.zeros(node, spec)
        if zero and (other := _other_term(node, zero)) is not None:
            return parts[other]
        if node.target is aten.clone.default and self._is_of_weight(node):
            if all(part.meta["val"].is_contiguous() for part in parts.values()):
                return next(iter(parts.values()))
        return super().compute(node, spec)

    def whole(self, node: fx.Node, reader: fx.Node, spec: Spec) -> fx.Node:
        return self.put_together(node) if node in self.flow.held else node


class _Unstacker:
    """Computes what is made from one concatenation part by part, in a copy of the graph.

    Args:
        whole: the concatenation, and from how many elements on a value is wide.
        divided: where a product that is divided, in the place of a concatenation, has its parts,
            and these.
    """

    def __init__(
        self,
        joint: JointGraph,
        whole: tuple[fx.Node, float],
        divided: tuple[HeadDim, Parts] | None = None,
    ):
        self.rewriting, (cat, wide_numel) = Rewriting(joint), whole
        self.joint, self.builder = self.rewriting.joint, self.rewriting.builder
        self.sizes = self.rewriting.sizes
        self.cat = self.joint.by_name[cat.name]
        self.flow = flow = PartsFlow(self.joint, self.cat, wide_numel, divided)
        numbers = range(len(flow.parts.lengths))
        self.each = [_Part(self.rewriting, flow, number, self._whole) for number in numbers]
        self.put_together: dict[fx.Node, fx.Node] = {}
        self.in_parts = {*flow.held, *flow.picks, *flow.combined}

    def unstack(self) -> Rewritten:
        """The new graph, and the names of its nodes that were changed or made.

        Raises:
            CannotTake: the whole of a wide value is needed, or nothing would be gained.
            UnknownSize: a symbolic size cannot be written.
        """
        graph = self.joint.module.graph
        for node in self.joint.nodes:
            with graph.inserting_before(node):
                if node in self.flow.picks:
                    replace_alike(self.rewriting, node, self._pick(node))
                elif node in self.flow.combined:
                    replace_alike(self.rewriting, node, self._combination(node))
                elif node in self.flow.held and (readers := node.users.keys() - self.in_parts):
                    self.rewriting.replace(node, self._whole(node), [*readers])
        return self.rewriting.result()

    def _whole(self, node: fx.Node) -> fx.Node:
        """The parts of a narrow value put together.

        Raises:
            CannotTake: the value is wide.
        """
        if self.flow.is_wide(node):
            raise CannotTake(node, "the whole of it is needed")
        if node not in self.put_together:
            held, shape = self.flow.held[node], node.meta["val"].shape
            stacked = [self.flow.axis.stacked(shape, held, one.length) for one in self.each]
            pairs = zip(self.each, stacked, strict=True)
            parts = [self.sizes.reshaped(one.value(node, held), to) for one, (to, _) in pairs]
            together = self.builder.call(aten.cat.default, parts, stacked[0][1])
            self.put_together[node] = self.sizes.reshaped(together, shape)
        return self.put_together[node]

    # ---- what reads the parts --------------------------------------------------------------------
    def _pick(self, node: fx.Node) -> fx.Node:
        """The value of a node that takes one part: the part, with the shape that the node has."""
        (source,) = (n for n in node.all_input_nodes if n in self.flow.held)
        part = self.each[self.flow.picks[node]].value(source, self.flow.held[source])
        return self.sizes.reshaped(part, list(node.meta["val"].shape))

    def _combination(self, node: fx.Node) -> fx.Node:
        """A reduction over the parts, or a product that sums over them."""
        source = next(n for n in node.all_input_nodes if n in self.flow.held)
        held = self.flow.held[source]
        needs: OperandSpecs = {source: held}
        if ops.is_matmul(node):
            needs = self.flow.axis.sum_operands(node, source, held)
        total: fx.Node | None = None
        for one in self.each:
            each = {n: one.value(n, spec) for n, spec in needs.items()}
            if node.target not in _NOT_SUMS and is_zero(each[source]):
                continue
            result = self._reduced(node, each)
            if self._sums_wide(node, source):
                result = self.builder.call(_CONVERT, result, torch.float32)
            combine: Any = COMBINED.get(node.target, aten.add.Tensor)
            total = result if total is None else self.builder.call(combine, total, result)
        if total is None:
            raise CannotTake(node, "all its parts are zero")
        dtype = node.meta["val"].dtype
        if total.meta["val"].dtype != dtype:
            total = self.builder.call(_CONVERT, total, dtype)
        return total if node.target not in MEANS else self._mean(node, source, total)

    def _sums_wide(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether the results of a product's parts are added up in float32.

        A loop over tokens adds gradients of weights up in float32 by itself.
        """
        low = node.meta["val"].dtype in LOW_PRECISION and node.target not in _NOT_SUMS
        return self.flow.is_product and low and self.flow.narrow.isdisjoint((source, node))

    def _reduced(self, node: fx.Node, each: dict[fx.Node, fx.Node]) -> fx.Node:
        """The node's op on one part; the sum of it for a mean."""
        value = node.meta["val"]
        if ops.is_reduction(node):
            (part,) = each.values()
            shape, dtype = shape_of(part), part.meta["val"].dtype
            dims = reduced_dims(node, len(shape))
            if math.prod(shape[d] for d in dims) == 1 and dtype == value.dtype:
                return self.sizes.reshaped(part, list(value.shape))
            if dtype in LOW_PRECISION and node.target not in _NOT_SUMS:
                raise CannotTake(node, f"each part of its sum would be rounded to {dtype}")
            if node.target in MEANS:
                keepdim = value.dim() == len(shape)
                return self.builder.call(aten.sum.dim_IntList, part, dims, keepdim)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: each.get(n, n))
        return self.builder.call(node.target, *args, **kwargs)

    def _mean(self, node: fx.Node, source: fx.Node, total: fx.Node) -> fx.Node:
        shape = source.meta["val"].shape
        dims = reduced_dims(node, len(shape))
        (count,) = self.sizes.arguments([math.prod(shape[d] for d in dims)])
        return self.builder.call(aten.div.Tensor, total, count)


def _other_term(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
    """The term that is left of a sum of two with the same shape and dtype, of which one is 0."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    others = [n for n in node.all_input_nodes if n not in zero]
    if len(others) != 1 or len(node.all_input_nodes) != 2:
        return None
    old, value = value_of(others[0]), node.meta["val"]
    if old is None or old.dtype != value.dtype or not same_shape(old.shape, value.shape):
        return None
    return others[0]
