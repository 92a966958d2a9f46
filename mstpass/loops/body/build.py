"""The body of a loop: a region's nodes on one chunk of tokens or heads, as a pure graph.

    body([rows,] [start,] *chunks, *whole[, valid]) -> results

    rows      the chunk's length, only if the token count is symbolic
    start     the number of the chunk's first row, only if attention needs it
    chunks    the rows of each sliced input, [c, ...]
    whole     the inputs that every chunk reads in full, such as weights
    valid     bool [c], only if the last chunk overlaps the one before it: the rows that the last
              chunk does not compute as well
    results   one for each output: its rows if it is stacked, a partial sum if it is summed

Pseudo-code::

    for node in members, in the graph's order:
        if it sums over tokens: sum over the chunk, in the accumulator's dtype, rows masked by valid
        else:                   the same op on the operands' chunks     (graph/axes.py)

A sum of exponentials may be relative to the chunk's own maximum (graph/row_sums.py).

Some nodes get another form, as they would cost a second buffer of the chunk's logits or one more
pass over them: gathers and scatters of one element per row (graph/one_per_row.py) and row sums
(graph/row_sums.py), and products (products.py). Rewrites of the finished body follow (buffers.py).

If the token count is symbolic, a chunk's length is known only at run time, so ``rows`` stands
wherever an argument holds it. The body is built and checked at the length that the plan chose. Of
heads, the other sizes may be symbolic: they are among the whole inputs, and the body is built and
checked at the generic point (graph/sizes.py). At the end its values get the sizes of the traced
batch, and the length of its chunks, by which bytes are counted.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import REPORT, SEPARATE_DIMS
from mstpass.graph.attention import RowsCall, is_attention, is_backward, operand_rows, rows_call
from mstpass.graph.attention_rows import attend_rows, attend_rows_backward
from mstpass.graph.axes import QUERIES, TOKEN_AXIS, axis_of, check_chunk, chunk_call
from mstpass.graph.builder import Builder, SizeNodes, UnknownSize
from mstpass.graph.grouped_products import grouped_rows, grouped_sums
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.loop_op import START, SUM, fitted_length, initial
from mstpass.graph.one_per_row import (
    gather_one,
    gathered_per_row,
    scatter_one,
    scattered_per_row,
)
from mstpass.graph.renew_values import CannotRenew, renew_value
from mstpass.graph.row_sums import (
    ExponentialSum,
    exponential_sum,
    exponentials,
    rewritten_row_sum,
)
from mstpass.graph.sizes import expression, generic, hint, is_size, same_shape, symbols_of
from mstpass.graph.tokens import CannotTake, Refusal, Spec
from mstpass.loops.body.buffers import (
    eliminate_common_subexpressions,
    materialize_row_values,
    rematerialize_at_readers,
    write_gradients_in_place,
)
from mstpass.loops.body.products import join_products, product_by_columns, products_by_columns
from mstpass.loops.operand_layout import is_literal
from mstpass.loops.region_facts import LOW_PRECISION, members_of
from mstpass.plans import FLOAT32, LoopPlan

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def build_body(joint: JointGraph, loop: LoopPlan, builder: Builder) -> list[fx.Node]:
    """Write the body into the builder's empty graph, its output node included.

    Returns:
        The nodes of the results, in the order of ``loop.outputs``.

    Raises:
        CannotTake: a node's chunk does not have the shape that the plan expects, or a symbolic
            size cannot be written.
    """
    try:
        return _Body(joint, loop, builder).build()
    except (UnknownSize, CannotRenew) as error:
        raise CannotTake(joint.by_name[loop.members[0]], REPORT(str(error))) from None


class _Body:
    def __init__(self, joint: JointGraph, loop: LoopPlan, builder: Builder):
        chunks = loop.cut
        self.joint, self.loop, self.builder = joint, loop, builder
        self.chunk_tokens = chunks.length
        self.axis = axis_of(chunks.axis, chunks.total)
        self.symbolic = chunks.symbolic
        self.overlaps = not self.symbolic and chunks.count * chunks.length != chunks.total
        self.rows: int | fx.Node = self.chunk_tokens  # the chunk's length as an argument
        self.specs: dict[fx.Node, Spec | None] = {
            joint.by_name[name]: spec for name, spec in loop.spec_of().items()
        }
        self.sizes = SizeNodes(builder)  # the symbolic sizes among the inputs of the body
        self.traced: dict[fx.Node, Any] = {}  # inputs of other sizes in the traced batch
        self.traced_rows = min(chunks.total, fitted_length(chunks.length, chunks.total))
        members = members_of(joint, loop)
        self.by_columns = products_by_columns(members) if self.axis is TOKEN_AXIS else set()
        self.relative = {item.node for item in loop.outputs if item.relative_to}
        of_queries = filter(is_attention, members) if chunks.axis == QUERIES else ()
        calls = {node: rows_call(node) for node in of_queries}  # a mask has rows of its own
        self.attention = {n: call for n, call in calls.items() if isinstance(call, RowsCall)}
        self.has_sizes = False  # besides a chunk's length, symbolic ones that ops compute with
        self.valid: fx.Node | None = None
        self.env: dict[tuple[fx.Node, Spec | None], fx.Node] = {}

    def build(self) -> list[fx.Node]:
        self._add_inputs()
        for name in self.loop.members:
            node = self.joint.by_name[name]
            spec = self.specs[node]
            try:
                built = self._part(node) if spec is None else self._chunk_of(node, spec)
            except RuntimeError as error:  # torch cannot tell whether two symbolic sizes are equal
                raise CannotTake(node, REPORT(f"its chunk cannot be computed: {error}")) from error
            self.env[node, spec] = built
        results = [self._result(self.joint.by_name[o.node], o.spec) for o in self.loop.outputs]
        output = self.builder.graph.output(tuple(results))
        join_products(self.builder, self.loop)
        eliminate_common_subexpressions(self.builder)
        if not self.has_sizes:
            write_gradients_in_place(self.builder, self.symbolic)
        materialize_row_values(self.builder.graph)
        rematerialize_at_readers(self.builder.graph)
        if self.traced:
            self.builder.compute_values(self.traced)
            return list(output.args[0])
        for node in list(self.builder.graph.nodes):
            if node.op == "call_function":
                renew_value(node)  # what a rewrite put before it may have other strides
        return list(output.args[0])

    # ---- inputs and results --------------------------------------------------------------------
    def _add_inputs(self) -> None:
        sliced = [item for item in self.loop.inputs if item.spec]
        if self.symbolic:
            self.rows = self.builder.placeholder("rows", self.chunk_tokens)
            self.traced[self.rows] = self.traced_rows
        self.start = self.builder.placeholder(START, 0) if self.attention else None
        chunks = []
        for position, item in enumerate(sliced):
            value = self._value(item.node)
            shape = self.axis.rows(value.shape, item.spec, self.chunk_tokens).shape
            chunk = self._placeholder(f"chunk_{position}", self.builder.empty(shape, value))
            chunks.append(chunk)
            if self.symbolic:
                self.traced[chunk] = self.builder.empty([self.traced_rows, *shape[1:]], value)
        self._add_whole_inputs()
        for item, chunk in zip(sliced, chunks, strict=True):
            node = self.joint.by_name[item.node]
            self.env[node, item.spec] = self._from_rows(chunk, node, item.spec)
        if self.loop.unit is not None:
            value = self._value(self.loop.unit)
            unit = self.builder.filled(value.shape, 1, value)
            self.env[self.joint.by_name[self.loop.unit], ()] = unit

    def _add_whole_inputs(self) -> None:
        nodes = [self.joint.by_name[item.node] for item in self.loop.inputs if not item.spec]
        for position, node in enumerate(itertools.filterfalse(is_literal, nodes)):
            value: Any = node.meta["val"] if is_size(node) else self._value(node.name)
            self.env[node, ()] = self._placeholder(f"whole_{position}", value)
            if is_size(node):
                self.sizes.known[expression(value)] = self.env[node, ()]
        if self.overlaps:
            first = self._value(self.loop.outputs[0].node)
            with self.builder.mode:
                mask = torch.empty([self.chunk_tokens], dtype=torch.bool, device=first.device)
            self.valid = self.builder.placeholder("valid", mask)
        for node in filter(is_literal, nodes):
            self.env[node, ()] = self.builder.call(node.target, *node.args, **node.kwargs)

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        """An input of the body; of heads, with its symbolic sizes at the generic point."""
        if self.axis is TOKEN_AXIS:
            fixed = hint(value) if isinstance(value, torch.SymInt) else value
            return self.builder.placeholder(name, fixed)
        node = self.builder.placeholder(name, self.builder.sized(value, generic))
        if symbols_of(value):
            self.traced[node] = self.builder.sized(value, hint)
            self.has_sizes = not self.attention  # which reads keys of any length, and alone does
        return node

    def _value(self, name: str) -> torch.Tensor:
        value = value_of(self.joint.by_name[name])
        if value is None:
            reason = SEPARATE_DIMS("a loop would read it, but it is not one tensor")
            raise CannotTake(self.joint.by_name[name], reason)
        return value

    def _from_rows(self, rows: fx.Node, node: fx.Node, spec: Spec) -> fx.Node:
        """``[c, rest]`` in chunk form: the tokens or heads in their places."""
        layout = self.axis.rows(node.meta["val"].shape, spec, self.rows)
        built = self.sizes.reshaped(rows, layout.ordered)
        if layout.order != sorted(layout.order):
            built = self.builder.call(aten.permute.default, built, layout.inverse)
        shape = self.axis.chunk_shape(node, spec, self.rows)
        return self.sizes.reshaped(built, shape)

    def _result(self, node: fx.Node, spec: Spec | None) -> fx.Node:
        """What the body returns for a node: ``[c, rest]``, or the partial sum as it is."""
        built = self.env[node, spec]
        if spec is None:
            return built
        shape, dim = self.axis.stacked(node.meta["val"].shape, spec, self.rows)
        if dim:
            return self.sizes.reshaped(built, shape)
        layout = self.axis.rows(node.meta["val"].shape, spec, self.rows)
        built = self.sizes.reshaped(built, layout.apart)
        if layout.order != sorted(layout.order):
            built = self.builder.call(aten.permute.default, built, layout.order)
        return self.sizes.reshaped(built, layout.shape)

    # ---- nodes ---------------------------------------------------------------------------------
    def _chunk_of(self, node: fx.Node, spec: Spec) -> fx.Node:
        if node in self.attention:
            return self._attention_of_rows(node, spec, self.attention[node])
        rows = self.rows if isinstance(self.rows, fx.Node) else None
        target, args, kwargs = chunk_call(
            node, spec, self.chunk_tokens, self._operand, rows, self.axis
        )
        if self.has_sizes:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._as_argument)
        built: fx.Node | None
        if self.has_sizes:  # the forms below have sizes of the chunk as plain ints
            built = self._constant(*args, **kwargs) if target is aten.full.default else None
        elif node in self.by_columns:
            built = product_by_columns(self.builder, *args)
        elif gathered_per_row(node) == 1:
            built = gather_one(self.builder, *args[:3])
        elif scattered_per_row(node) == 1:
            built = scatter_one(self.builder, node, args)
        else:
            built = rewritten_row_sum(self.builder, target, args, kwargs)
        if built is None:
            built = self.builder.call(target, *args, **kwargs)
        check_chunk(node, spec, self.chunk_tokens, built, self.axis)
        return built

    def _attention_of_rows(self, node: fx.Node, spec: Spec, call: RowsCall) -> fx.Node:
        """Attention by the op for rows; its results are the first of the node's."""
        needs = operand_rows(node, spec)
        assert not isinstance(needs, Refusal), "the needs is no refusal"
        inputs = [self._operand(n, needs[n]) for n in call.tensors]
        (length,) = self.sizes.arguments([call.length])
        how = (self.start, length, call.causal, call.scale)
        if is_backward(node):
            return self.builder.call(attend_rows_backward, *inputs, *how, self.overlaps)
        return self.builder.call(attend_rows, *inputs, *how, call.column)

    def _operand(self, node: fx.Node, spec: Spec) -> fx.Node:
        """What an operand of a member is in the body; a subgraph is called as it is."""
        if node.op == "get_attr" and (node, spec) not in self.env:
            subgraph = self.builder.graph.get_attr(str(node.target))
            subgraph.meta["val"] = getattr(self.joint.module, str(node.target))
            self.env[node, spec] = subgraph
        return self.env[node, spec]

    def _as_argument(self, value: Any) -> Any:
        return self.sizes.arguments([value])[0] if isinstance(value, torch.SymInt) else value

    def _constant(self, shape: list[Any], value: Any, **kwargs: Any) -> fx.Node:
        """A constant of a symbolic shape: FX cannot trace, nor unpickle, sizes without a tensor."""
        one = self.builder.call(aten.full.default, [1] * len(shape), value, **kwargs)
        return self.builder.call(aten.expand.default, one, shape)

    def _part(self, node: fx.Node) -> fx.Node:
        """What a chunk gives of a value that is reduced over tokens."""
        if node.name in self.relative:
            found = exponential_sum(node)
            assert found is not None, node
            return self._exponential_sum(node, found)
        if (kind := ops.row(node).combine) != SUM:
            operands = {n: self.env[n, self.specs[n]] for n in node.all_input_nodes}
            for n in filter(self.specs.get, operands if self.valid is not None else ()):
                start = initial(kind, operands[n].meta["val"].dtype)
                operands[n] = self._masked(operands[n], self.specs[n] or (), start)
            args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
            return self.builder.call(node.target, *args, **kwargs)
        return self._partial_sum(node)

    def _exponential_sum(self, node: fx.Node, found: ExponentialSum) -> fx.Node:
        """The sum of a chunk's exponentials, relative to the chunk's own maximum."""
        spec = self.specs[found.values]
        assert spec is not None, "the spec is known"
        values, maximum = self.env[found.values, spec], self.env[found.maximum, None]
        if self.loop.accumulate == FLOAT32 and values.meta["val"].dtype in LOW_PRECISION:
            values, maximum = (self._cast(n, torch.float32) for n in (values, maximum))
        shape = list(values.meta["val"].shape)
        for dim in found.dims:
            shape[dim] = 1
        summed = exponentials(self.builder, values, self.sizes.reshaped(maximum, shape), found)
        if self.valid is not None:
            summed = self._masked(summed, spec)
        return self.builder.call(node.target, summed, *node.args[1:])

    def _partial_sum(self, node: fx.Node) -> fx.Node:
        """The sum over the chunk's tokens, in the accumulator's dtype, or float32 to be rounded."""
        source = next((n for n in node.all_input_nodes if self.specs.get(n)), None)
        value = node.meta["val"]
        if source is None:  # a sum of sums: the parts are in the accumulator's dtype already
            if node.target is _CONVERT:  # autocast's; none is left, for products to add up in place
                part = self.env[node.all_input_nodes[0], None]
                if part.meta["val"].dtype == value.dtype:
                    return part
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda n: self.env[n, () if is_size(n) else None]
            )
            return self.builder.call(node.target, *args, **kwargs)
        needs = self.axis.sum_operands(node, source, self.specs[source] or ())
        is_low, in_float32 = value.dtype in LOW_PRECISION, self.loop.accumulate == FLOAT32
        if node.target is operator.getitem:  # of an op that sums by itself, and has several results
            whole = self.env[source, needs[source]]
            part = self.builder.call(operator.getitem, whole, node.args[1])
            return self._cast(part, torch.float32) if is_low and in_float32 else part
        is_grouped = node.target is grouped_sums
        is_product = ops.is_matmul(node)
        widen = is_low and (in_float32 or not is_product)  # products are rounded once, in place
        matmul_widens = is_grouped or (is_product and value.device.type == "cuda")
        parts = {n: self.env[n, spec] for n, spec in needs.items()}
        if widen and not matmul_widens:
            # Casting the chunk's operands is cheaper than casting a product of the weight's size.
            parts |= {n: self._cast(parts[n], torch.float32) for n in _floating(parts)}
        if _sums_features(node, parts[source], needs[source]):
            over_features = parts[source], [-1], True
            parts[source] = self.builder.call(aten.sum.dim_IntList, *over_features, **node.kwargs)
        if self.valid is not None:
            per_token = {n: part for n, part in parts.items() if needs[n]}
            summed = _floating(per_token) or per_token  # not indices, if there are values
            smallest = min(summed, key=lambda n: parts[n].meta["val"].numel())
            parts[smallest] = self._masked(parts[smallest], needs[smallest])
        if is_grouped:
            dtype = torch.float32 if widen else value.dtype
            return self.builder.call(node.target, *(parts[n] for n in node.args[:4]), dtype)  # type: ignore[index]
        if widen and matmul_widens and node.target is grouped_rows:  # no kernel widens its result
            args = fx.map_arg(node.args, parts.__getitem__)
            return self._cast(self.builder.call(node.target, *args), torch.float32)
        if widen and matmul_widens:
            left, right = (parts[n] for n in ops.matmul_factors(node))
            product = aten.mm.dtype if value.dim() == 2 else aten.bmm.dtype
            return self.builder.call(product, left, right, torch.float32)
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: self.env[n, ()] if is_size(n) else parts[n]
        )
        built = self.builder.call(node.target, *args, **kwargs)
        shape, expected = list(built.meta["val"].shape), list(value.shape)
        if not same_shape(shape, expected):
            reason = REPORT(f"its partial sum has shape {shape}, not {expected}")
            raise CannotTake(node, reason)
        return built

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.builder.call(_CONVERT, node, dtype)

    def _masked(self, node: fx.Node, spec: Spec, fill: float = 0) -> fx.Node:
        """The node with what changes no sum, or no maximum, in the rows of the last chunk."""
        assert self.valid is not None, "the valid is known"
        value = node.meta["val"]
        apart, repeated, shape = self.axis.mask_shapes(value.shape, spec, self.chunk_tokens)
        valid = self.sizes.reshaped(self.valid, apart)
        if not same_shape(apart, repeated):
            valid = self.builder.call(aten.expand.default, valid, repeated)
        valid = self.sizes.reshaped(valid, shape)
        return self.builder.call(aten.where.self, valid, node, self.builder.filled([], fill, value))


def _floating(parts: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    return [n for n, part in parts.items() if part.meta["val"].is_floating_point()]


def _sums_features(node: fx.Node, operand: fx.Node, spec: Spec) -> bool:
    """Whether the node sums over tokens and over the last dim, so that the latter can go first.

    A row sum runs in the kernels that read the chunk's logits row by row in any case. A single sum
    over both would be one more kernel that reads them, so that Inductor would write them to memory.
    """
    value = operand.meta["val"]
    if node.target not in (aten.sum.default, aten.sum.dim_IntList) or value.dim() < 2:
        return False
    last = value.dim() - 1
    dims = [d % value.dim() for d in node.args[1]] if len(node.args) > 1 else [last]  # type: ignore[union-attr]
    return last in dims and last not in spec and value.dtype not in LOW_PRECISION
