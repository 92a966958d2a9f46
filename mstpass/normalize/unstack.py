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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated, rewritten
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import ANY, MAX, MIN, SUM, CannotTake, Reduced, Refusal, Spec
from mstpass.normalize.divided_products import Division, next_divisions
from mstpass.normalize.partial import Partial, downstream, replace_alike
from mstpass.normalize.parts import CATS, LOW_PRECISION, PartsFlow, parts_of_cat
from mstpass.normalize.sums_over_tokens import mean_as_sum
from mstpass.regions.anchors import WIDE_OF_ANCHOR

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
Whole = Callable[[fx.Node], fx.Node]
_COMBINE: Mapping[Reduced, Any] = {  # the op that combines what two parts are reduced to
    SUM: aten.add.Tensor,
    MAX: aten.maximum.default,
    MIN: aten.minimum.default,
    ANY: aten.logical_or.default,
}


def unstack(joint: JointGraph) -> Rewritten:
    """Compute such values part by part, in a copy of the graph.

    Returns:
        The copy and the names of the nodes that were changed or made; the graph itself if there is
        no such value.
    """
    joint, of_cats = repeated(joint, _next_cat, _unstacked)
    joint, of_products = repeated(joint, next_divisions, divided)
    return joint, of_cats | of_products


def _unstacked(joint: JointGraph, found: tuple[fx.Node, float]) -> Rewritten:
    cat, wide_numel = found

    def flow_in(joint: JointGraph) -> PartsFlow:
        whole = joint.by_name[cat.name]
        return PartsFlow(joint, whole, wide_numel, *parts_of_cat(whole))

    return _by_part(joint, flow_in)


def divided(joint: JointGraph, divisions: Sequence[Division]) -> tuple[JointGraph, set[str]]:
    """The graph in which all of these products are computed part by part.

    Raises:
        CannotTake, UnknownSize: one of them cannot.
    """
    changed: set[str] = set()
    for division in divisions:

        def flow_in(joint: JointGraph, division: Division = division) -> PartsFlow:
            product, parts = joint.by_name[division.product], division.parts
            wide_numel = WIDE_OF_ANCHOR * numel(product) / len(parts.lengths)
            return PartsFlow(joint, product, wide_numel, division.held, parts, is_product=True)

        joint, names = _by_part(joint, flow_in)
        changed |= names
    return joint, changed


def _by_part(joint: JointGraph, flow_in: Callable[[JointGraph], PartsFlow]) -> Rewritten:
    """Compute values part by part; sums, which parts can add up, replace the means of these."""
    held = flow_in(joint).held
    means = (node for node in joint.nodes if node.target is aten.mean.dim)
    of_parts = (node for node in means if node.all_input_nodes[0] in held)
    rewriting = Rewriting(rewritten(joint, of_parts, mean_as_sum)[0])
    return Unstacker(rewriting, flow_in(rewriting.joint)).unstack()


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


class Part(Partial):
    """One part of the values that consist of parts."""

    def __init__(
        self,
        rewriting: Rewriting,
        flow: PartsFlow,
        number: int,
        whole: Whole,
        grid: Sequence[Size] = (),
    ):
        length = flow.parts.lengths[number] if flow.parts.lengths else None
        super().__init__(rewriting, grid, flow.axis, length)
        self.flow, self.number, self.put_together = flow, number, whole

    def is_given(self, node: fx.Node, spec: Spec) -> bool:
        flow = self.flow
        if node not in flow.held:
            refused = isinstance(self.axis.operand_specs(node, spec), Refusal)
            return refused or not self.is_computed(node)
        if flow.held[node] != spec:
            raise CannotTake(node, "has its parts in another dim")
        is_zero = self.number in flow.zero.get(node, ())
        return is_zero or flow.parts.written(node, spec) is not None

    def is_computed(self, node: fx.Node) -> bool:
        """Whether no part is taken of a value of which nothing else is known."""
        wide = self.flow.is_wide(node) or any(map(self.flow.is_wide, node.all_input_nodes))
        return wide or self._is_of_weight(node)

    def _is_of_weight(self, node: fx.Node) -> bool:
        """Whether a slice is taken where a weight enters the step."""
        return self.flow.is_product and node.op == "call_function" and ops.is_weight(node)

    def given(self, node: fx.Node, spec: Spec) -> fx.Node:
        """What is written, or zeros; a slice of a value of which nothing else is known."""
        if node not in self.flow.held:
            return self.in_chunk_form(self.taken(node, spec), node, spec)
        written = self.flow.parts.written(node, spec) or {}
        if self.number not in written:
            return self.zeros(node, spec)
        return self.in_chunk_form(written[self.number], node, spec)

    def taken(self, node: fx.Node, spec: Spec) -> fx.Node:
        """The part of a value."""
        shape, dim = self.axis.stacked(node.meta["val"].shape, spec)
        heads, bounds = self.sizes.reshaped(node, shape), self.flow.parts.bounds(self.number)
        return self.builder.call(aten.slice.Tensor, heads, dim, *bounds)

    def compute(self, node: fx.Node, spec: Spec) -> fx.Node:
        zero = self.flow.zero_in(self.number, node.all_input_nodes)
        if zero and not self.is_given(node, spec):
            if (other := other_term(node, zero)) is not None:
                return self.known[other, spec]
        if node.target is aten.clone.default and self._is_of_weight(node):
            parts = [self.known[key] for key in self._needed((node, spec))]
            if parts and all(part.meta["val"].is_contiguous() for part in parts):
                return parts[0]
        return super().compute(node, spec)

    def together(self, node: fx.Node, held: Spec, each: Sequence[Part]) -> fx.Node:
        """All parts of a value, in any shape."""
        shape = node.meta["val"].shape
        stacked = [self.axis.stacked(shape, held, one.length) for one in each]
        pairs = zip(each, stacked, strict=True)
        parts = [self.sizes.reshaped(one.value(node, held), to) for one, (to, _) in pairs]
        return self.builder.call(aten.cat.default, parts, stacked[0][1])

    def whole(self, node: fx.Node, reader: fx.Node, spec: Spec) -> fx.Node:
        return self.put_together(node) if node in self.flow.held else node


class Unstacker:
    """Computes what has parts part by part, in a copy of the graph."""

    def __init__(self, rewriting: Rewriting, flow: PartsFlow, part: type[Part] = Part):
        self.rewriting, self.flow = rewriting, flow
        self.joint, self.builder = rewriting.joint, rewriting.builder
        self.sizes = rewriting.sizes
        computed = sorted(flow.parts.numbers - flow.parts.rest)
        self.each = {number: part(rewriting, flow, number, self.whole) for number in computed}
        self.whole_values: dict[fx.Node, fx.Node] = {}
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
                    self.rewriting.replace(node, self.whole(node), [*readers])
        return self.rewriting.result()

    def whole(self, node: fx.Node) -> fx.Node:
        """The parts of a narrow value put together.

        Raises:
            CannotTake: the value is wide.
        """
        if self.flow.is_wide(node):
            raise CannotTake(node, "the whole of it is needed")
        if node not in self.whole_values:
            each = [*self.each.values()]
            together = each[0].together(node, self.flow.held[node], each)
            self.whole_values[node] = self.sizes.reshaped(together, node.meta["val"].shape)
        return self.whole_values[node]

    # ---- what reads the parts --------------------------------------------------------------------
    def _pick(self, node: fx.Node) -> fx.Node:
        """The value of a node that takes one part: the part, with the shape that the node has."""
        (source,) = (n for n in node.all_input_nodes if n in self.flow.held)
        part = self.each[self.flow.picks[node]].value(source, self.flow.held[source])
        return self.sizes.reshaped(part, list(node.meta["val"].shape))

    def _combination(self, node: fx.Node) -> fx.Node:
        """A reduction over the parts, or a product that sums over them."""
        source = next(n for n in node.all_input_nodes if n in self.flow.held)
        how, dtype = self.flow.combined[node], node.meta["val"].dtype
        total: fx.Node | None = None
        for number in sorted(self.flow.parts.numbers):
            zero = self.flow.zero_in(number, node.all_input_nodes)
            if zero and how == SUM and ops.row(node).linear(node, zero):
                continue
            if number not in self.each:
                raise CannotTake(node, "sums over values that are not computed")
            result = self._reduced(node, source, self.each[number])
            if self._sums_wide(node, source):
                result = self.builder.call(_CONVERT, result, torch.float32)
            total = result if total is None else self.builder.call(_COMBINE[how], total, result)
        if total is None:
            raise CannotTake(node, "all its parts are zero")
        if total.meta["val"].dtype != dtype:
            total = self.builder.call(_CONVERT, total, dtype)
        return total

    def _sums_wide(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether the results of a product's parts are added up in float32.

        A loop over tokens adds gradients of weights up in float32 by itself.
        """
        low = node.meta["val"].dtype in LOW_PRECISION and self.flow.combined[node] == SUM
        return self.flow.is_product and low and self.flow.narrow.isdisjoint((source, node))

    def _reduced(self, node: fx.Node, source: fx.Node, one: Part) -> fx.Node:
        """The node's op on one part."""
        value, held = node.meta["val"], self.flow.held[source]
        if ops.is_reduction(node):
            part = one.value(source, held)
            shape = shape_of(part)
            single = math.prod(shape[d] for d in reduced_dims(node, len(shape))) == 1
            if single and part.meta["val"].dtype == value.dtype:
                return self.sizes.reshaped(part, list(value.shape))
            several, is_sum = len(self.each) > 1, self.flow.combined[node] == SUM
            if several and is_sum and value.dtype in LOW_PRECISION:
                raise CannotTake(node, f"each part of its sum would be rounded to {value.dtype}")
        return one.summed(node, source, held)


def other_term(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
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
