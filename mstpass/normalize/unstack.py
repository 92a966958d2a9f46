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

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.chunk_form import add_chunk
from mstpass.graph.joint import JointGraph, numel, value_of
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.rewriting import Rewriting, Rewritten, repeated
from mstpass.graph.sizes import Size, is_size, same_shape
from mstpass.graph.token_rules.along_dims import reduced_dims
from mstpass.graph.token_rules.arguments import shape_of
from mstpass.graph.tokens import CannotTake, Refusal, Spec
from mstpass.normalize.divided_products import Division, next_divisions
from mstpass.normalize.partial import replace_alike
from mstpass.normalize.parts import (
    COMBINED,
    LOW_PRECISION,
    MEANS,
    Parts,
    PartsFlow,
    parts_after_view,
    written_parts,
)
from mstpass.normalize.token_window import downstream
from mstpass.regions.anchors import WIDE_OF_ANCHOR

aten = torch.ops.aten
_CATS = (aten.cat.default, aten.stack.default)
_CONVERT = torch.ops.prims.convert_element_type.default
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
        wide_numel = WIDE_OF_ANCHOR * numel(product) / len(division.parts.sizes)
        joint, names = _Unstacker(joint, (product, wide_numel), division.parts).unstack()
        changed |= names
    return joint, changed


def _next_cat(joint: JointGraph, tried: set[str]) -> tuple[list[str], tuple[fx.Node, float]] | None:
    """A concatenation of wide values that was not tried yet, and what is wide there."""
    known = joint.cached(downstream)
    for node in joint.nodes:
        if node.target not in _CATS or node in joint.backward or node.name in tried:
            continue
        pieces: Any = node.args[0]
        anchors = [known[piece][1] for piece in pieces if piece in known]
        wide_numel = WIDE_OF_ANCHOR * min(map(numel, anchors), default=math.inf)
        if len(pieces) > 1 and all(numel(piece) >= wide_numel for piece in pieces):
            return [node.name], (node, wide_numel)
    return None


class _Unstacker:
    """Computes what is made from one concatenation part by part, in a copy of the graph.

    Args:
        whole: the concatenation, and from how many elements on a value is wide.
        parts: those of a product that is divided, in the place of a concatenation.
    """

    def __init__(self, joint: JointGraph, whole: tuple[fx.Node, float], parts: Parts | None = None):
        self.rewriting, (cat, wide_numel) = Rewriting(joint), whole
        self.joint, self.builder = self.rewriting.joint, self.rewriting.builder
        self.sizes = self.rewriting.sizes
        self.cat = self.joint.by_name[cat.name]
        self.divides = parts is not None
        self.flow = PartsFlow(self.joint, self.cat, wide_numel, parts)
        self.parts, self._wide = self.flow.parts, self.flow.is_wide
        self.built: dict[tuple[fx.Node, int, int], fx.Node | None] = {}  # (node, dim, number)
        self.put_together: dict[fx.Node, fx.Node] = {}
        self.in_parts = {*self.parts, *self.flow.picks, *self.flow.combined}
        self.changed: set[str] = set()

    def unstack(self) -> tuple[JointGraph, set[str]]:
        """The new graph, and the names of its nodes that were changed or made.

        Raises:
            CannotTake: the whole of a wide value is needed, or nothing would be gained.
            UnknownSize: a symbolic size cannot be written.
        """
        graph = self.joint.module.graph
        for node in self.joint.nodes:
            with graph.inserting_before(node):
                if node in self.flow.picks:
                    self._replace(node, self._pick(node))
                elif node in self.flow.combined:
                    self._replace(node, self._combination(node))
                elif node in self.parts and (readers := node.users.keys() - self.in_parts):
                    self.rewriting.replace(node, self._whole(node), [*readers])
        new = self.rewriting.finished()
        return new, {*new.new_names(self.joint), *(self.changed & new.by_name.keys())}

    # ---- computing parts -------------------------------------------------------------------------
    def _part(self, node: fx.Node, parts: Parts, number: int) -> fx.Node | None:
        """One part of a value, computed before the current place in the graph; None if it is 0."""
        key = (node, parts.dim, number)
        if key not in self.built:
            built = self._new_part(node, parts, number)
            if built is not None:
                built.meta = {**replacement_meta(node), **built.meta}
            self.built[key] = built
        return self.built[key]

    def _new_part(self, node: fx.Node, parts: Parts, number: int) -> fx.Node | None:
        if node not in self.parts:
            return self._part_of_other(node, parts, number)
        pieces = _pieces(node) if node.target in _CATS and node is self.cat else None
        pieces = pieces or written_parts(node, parts)
        if pieces is not None:
            part = pieces.get(number)
        elif ops.is_reshape(node):
            source = node.all_input_nodes[0]
            part = self._part(source, self.parts[source], number)
        else:
            return self._computed(node, parts, number)
        return part and self.sizes.reshaped(part, self._shape(node, parts, number))

    def _part_of_other(self, node: fx.Node, parts: Parts, number: int) -> fx.Node | None:
        """A part of a value that is not known to have parts: computed if wide, else sliced.

        Of a weight the slice is taken where the weight enters the step.
        """
        is_weight = self.divides and node.op == "call_function" and ops.is_weight(node)
        needs_wide = self._wide(node) or any(map(self._wide, node.all_input_nodes))
        is_view = ops.is_reshape(node)
        if is_view and (is_weight or needs_wide):  # its operand has parts of other sizes
            source = node.all_input_nodes[0]
            of_source = parts_after_view(value_of(node), value_of(source), parts)
            if of_source is not None:
                part = self._part(source, of_source, number)
                return part and self.sizes.reshaped(part, self._shape(node, parts, number))
        if is_weight and node.target is aten.clone.default:
            part = self._part(node.all_input_nodes[0], parts, number)
            if part is not None and part.meta["val"].is_contiguous():
                return part
        computed = not is_view and not isinstance(ops.operand_specs(node, (parts.dim,)), Refusal)
        if computed and (needs_wide or is_weight):
            return self._computed(node, parts, number)
        start, stop, step = self.sizes.arguments(parts.bounds(number))
        if step == 1:
            return self.builder.call(aten.slice.Tensor, node, parts.dim, start, stop)
        return self.builder.call(aten.slice.Tensor, node, parts.dim, start, stop, step)

    def _computed(self, node: fx.Node, parts: Parts, number: int) -> fx.Node | None:
        """The node's op on one part of its operands."""
        needs = ops.operand_specs(node, (parts.dim,))
        if isinstance(needs, Refusal):
            raise CannotTake(node, needs.reason)
        here = {n: dataclasses.replace(parts, dim=s[0]) for n, s in needs.items() if s}
        zero = {n for n in here if n in self.parts and self._part(n, here[n], number) is None}
        if zero:
            if ops.row(node).linear(node, zero):  # 0 whatever the dtype
                return None
            other = _other_term(node, zero)
            if other is not None:
                return self._part(other, here[other], number)
        return add_chunk(
            self.builder,
            node,
            (parts.dim,),
            parts.sizes[number],
            lambda n, _: self._operand(n, here.get(n), number),
            self.sizes,
        )

    def _operand(self, node: fx.Node, parts: Parts | None, number: int) -> fx.Node:
        if is_size(node):
            return node
        if parts is None:
            return self._whole(node) if node in self.parts else node
        part = self._part(node, parts, number)
        return self._zeros(node, parts, number) if part is None else part

    def _zeros(self, node: fx.Node, parts: Parts, number: int) -> fx.Node:
        sizes = self.sizes.arguments(self._shape(node, parts, number))
        return self.builder.filled(sizes, 0, node.meta["val"])

    def _shape(self, node: fx.Node, parts: Parts, number: int) -> list[Size]:
        shape: list[Any] = list(node.meta["val"].shape)
        shape[parts.dim] = parts.sizes[number]
        return shape

    def _whole(self, node: fx.Node) -> fx.Node:
        """The parts of a narrow value put together.

        Raises:
            CannotTake: the value is wide.
        """
        if self._wide(node):
            raise CannotTake(node, "the whole of it is needed")
        if node not in self.put_together:
            parts = self.parts[node]
            each = [self._operand(node, parts, number) for number in range(len(parts.sizes))]
            self.put_together[node] = self._joined(each, parts)
        return self.put_together[node]

    def _joined(self, each: list[fx.Node], parts: Parts) -> fx.Node:
        if not parts.interleaved:
            return self.builder.call(aten.cat.default, each, parts.dim)
        shape = list(each[0].meta["val"].shape)
        rows, whole = shape[parts.dim], sum(parts.sizes)
        columns = [*shape[: parts.dim], rows, 1, *shape[parts.dim + 1 :]]
        together = self.builder.call(
            aten.cat.default, [self.sizes.reshaped(part, columns) for part in each], parts.dim + 1
        )
        return self.sizes.reshaped(together, [*shape[: parts.dim], whole, *shape[parts.dim + 1 :]])

    # ---- what reads the parts --------------------------------------------------------------------
    def _pick(self, node: fx.Node) -> fx.Node:
        """The value of a node that takes one part: the part, with the shape that the node has."""
        (source,) = (n for n in node.all_input_nodes if n in self.parts)
        part = self._operand(source, self.parts[source], self.flow.picks[node])
        return self.sizes.reshaped(part, list(node.meta["val"].shape))

    def _combination(self, node: fx.Node) -> fx.Node:
        """A reduction over the parts, or a product that sums over them."""
        source = next(n for n in node.all_input_nodes if n in self.parts)
        parts = self.parts[source]
        needs: dict[fx.Node, Spec] = {source: (parts.dim,)}
        if ops.is_matmul(node):
            needs = ops.sum_operands(node, source, (parts.dim,))
        here = {n: dataclasses.replace(parts, dim=s[0]) for n, s in needs.items()}
        total: fx.Node | None = None
        for number in range(len(parts.sizes)):
            if node.target not in _NOT_SUMS and self._part(source, parts, number) is None:
                continue
            result = self._reduced(node, {n: self._operand(n, here[n], number) for n in here})
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
        return self.divides and low and self.flow.narrow.isdisjoint((source, node))

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

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        self.changed.update(user.name for user in node.users)
        replace_alike(self.rewriting, node, new)


def _pieces(cat: fx.Node) -> dict[int, fx.Node]:
    pieces: Any = cat.args[0]
    return dict(enumerate(pieces))


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
