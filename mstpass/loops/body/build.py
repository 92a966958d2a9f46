"""The body of a loop: a region's nodes redone at chunk size, as a pure graph.

Every node keeps its op (replay.py), but for a few that read a chunk's logits in a way that costs a
second buffer of them or one more pass over them (pick.py, rowsums.py, inplace.py).

Where the token count is symbolic, a chunk's length is known at run time only: it is the body's
first input, an int, and stands wherever an argument holds it. The body is still built, and
checked, at the length that the plan chose.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph import op_table
from mstpass.graph.builder import Builder
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.rebuild_node import check_chunk, chunk_call
from mstpass.graph.sizes import hint, is_size
from mstpass.graph.tokens import CannotTake, Refusal, Spec, chunk_shape
from mstpass.loops.body.common_subexpressions import eliminate_common_subexpressions
from mstpass.loops.body.gather_one_per_row import is_gather_of_one, is_scatter_of_one, pick, put
from mstpass.loops.body.gradient_in_place import write_gradients_in_place
from mstpass.loops.body.rematerialize_pointwise import (
    materialize_row_values,
    rematerialize_at_readers,
)
from mstpass.loops.body.row_sums import row_sum
from mstpass.plans import ChunkPlan, LoopPlan

aten = torch.ops.aten
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def build_body(
    joint: JointGraph, plan: ChunkPlan, loop: LoopPlan, builder: Builder, accumulate: str
) -> list[fx.Node]:
    """Add the body's nodes to the builder's empty graph, output node included.

    Placeholders: the chunk's length where it is not fixed, sliced inputs as ``[c, ...]``, whole
    inputs, and ``valid`` where chunks overlap.
    Returns the nodes of the outputs, in the order of ``loop.outputs``.

    Raises:
        CannotTake: a node's chunk does not have the shape that the plan expects.
    """
    return _Body(joint, plan, loop, builder, accumulate).build()


class _Body:
    def __init__(
        self, joint: JointGraph, plan: ChunkPlan, loop: LoopPlan, builder: Builder, accumulate: str
    ):
        self.joint, self.loop, self.builder = joint, loop, builder
        self.chunk, self.accumulate = plan.chunk_tokens, accumulate
        covered = plan.num_chunks * plan.chunk_tokens
        self.ragged = not plan.symbolic and covered != plan.num_tokens
        self.symbolic = plan.symbolic
        self.rows: int | fx.Node = self.chunk  # the chunk's length as an argument
        self.specs: dict[fx.Node, Spec | None] = {
            joint.by_name[name]: spec for name, spec in plan.members
        }
        self.valid: fx.Node | None = None
        self.env: dict[tuple[fx.Node, Spec | None], fx.Node] = {}

    def build(self) -> list[fx.Node]:
        self._add_inputs()
        for name in self.loop.members:
            node = self.joint.by_name[name]
            spec = self.specs[node]
            self.env[node, spec] = self._sum(node) if spec is None else self._copy(node, spec)
        results = [self._result(self.joint.by_name[o.node], o.spec) for o in self.loop.outputs]
        output = self.builder.graph.output(tuple(results))
        eliminate_common_subexpressions(self.builder)
        write_gradients_in_place(self.builder, self.symbolic)
        materialize_row_values(self.builder.graph)
        rematerialize_at_readers(self.builder.graph)
        return list(output.args[0])

    def _add_inputs(self) -> None:
        sliced = [i for i in self.loop.inputs if i.spec]
        device = torch.device("cpu")
        holders = []
        if self.symbolic:
            self.rows = self.builder.placeholder("rows", self.chunk)
        for position, item in enumerate(sliced):
            value = self._value(item.node)
            rest = [s for d, s in enumerate(value.shape) if d not in item.spec]
            fake = self.builder.empty([self.chunk, *rest], value)
            holders.append(self.builder.placeholder(f"chunk_{position}", fake))
            device = value.device
        for position, item in enumerate(i for i in self.loop.inputs if not i.spec):
            node, name = self.joint.by_name[item.node], f"whole_{position}"
            if is_size(node):
                self.env[node, ()] = self.builder.placeholder(name, hint(node.meta["val"]))
                continue
            value = self._value(item.node)
            self.env[node, ()] = self.builder.placeholder(name, value)
            device = value.device
        if self.ragged:
            with self.builder.mode:
                mask = torch.empty([self.chunk], dtype=torch.bool, device=device)
            self.valid = self.builder.placeholder("valid", mask)
        for item, holder in zip(sliced, holders, strict=True):
            node = self.joint.by_name[item.node]
            self.env[node, item.spec] = self._from_rows(holder, self._value(item.node), item.spec)
        if self.loop.unit is not None:
            value = self._value(self.loop.unit)
            unit = self.builder.call(
                aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device
            )
            self.env[self.joint.by_name[self.loop.unit], ()] = unit

    def _value(self, name: str) -> torch.Tensor:
        value = value_of(self.joint.by_name[name])
        if value is None:
            raise CannotTake(self.joint.by_name[name], "enters a loop but is not one tensor")
        return value

    def _from_rows(self, rows: fx.Node, value: torch.Tensor, spec: Spec) -> fx.Node:
        """``[c, rest]`` to the chunk form: token dims 1, ..., 1, c at their places."""
        rest = [d for d in range(value.dim()) if d not in spec]
        order = [*spec, *rest]
        ordered = [1] * (len(spec) - 1) + [self.rows] + [value.shape[d] for d in rest]
        node = rows
        if len(spec) > 1:
            node = self.builder.call(aten.reshape.default, node, ordered)
        if order != sorted(order):
            node = self.builder.call(
                aten.permute.default, node, [order.index(d) for d in range(len(order))]
            )
        return node

    def _result(self, node: fx.Node, spec: Spec | None) -> fx.Node:
        built = self.env[node, spec]
        if spec is None:
            return built
        order = [*spec, *(d for d in range(len(built.meta["val"].shape)) if d not in spec)]
        if order != sorted(order):
            built = self.builder.call(aten.permute.default, built, order)
        if len(spec) > 1:
            rest = list(built.meta["val"].shape[len(spec) :])
            built = self.builder.call(aten.reshape.default, built, [self.rows, *rest])
        return built

    # ---- nodes --------------------------------------------------------------------------------
    def _copy(self, node: fx.Node, spec: Spec) -> fx.Node:
        rows = self.rows if isinstance(self.rows, fx.Node) else None
        target, args, kwargs = chunk_call(node, spec, self.chunk, lambda n, s: self.env[n, s], rows)
        short = None
        if is_gather_of_one(node):
            short = pick(self.builder, args[0], args[1], args[2])
        elif is_scatter_of_one(node):
            short = put(self.builder, args[0], args[1], args[2], args[3])
        else:
            short = row_sum(self.builder, target, args, kwargs)
        built = self.builder.call(target, *args, **kwargs) if short is None else short
        check_chunk(node, spec, self.chunk, built)
        return built

    def _sum(self, node: fx.Node) -> fx.Node:
        """A partial sum over the chunk's tokens, in the accumulator's dtype."""
        source = next(n for n in node.all_input_nodes if self.specs.get(n))
        needs = op_table.sum_operands(node, source, self.specs[source] or ())
        if isinstance(needs, Refusal):
            raise CannotTake(node, needs.reason)
        value = value_of(node)
        assert value is not None
        widen = self.accumulate == "float32" and value.dtype in _LOW_PRECISION
        parts = {n: self.env[n, spec] for n, spec in needs.items()}
        widens_itself = op_table.is_matmul(node) and value.device.type == "cuda"
        if widen and not widens_itself:
            # The chunk's operands in float32: cheaper than a product of the weight's size.
            parts = {n: self._cast(part, torch.float32) for n, part in parts.items()}
        if _sums_rows(node, parts[source], needs[source]):
            parts[source] = self.builder.call(
                aten.sum.dim_IntList, parts[source], [-1], True, **node.kwargs
            )
        if self.valid is not None:
            smallest = min(parts, key=lambda n: parts[n].meta["val"].numel())
            parts[smallest] = self._mask(parts[smallest], needs[smallest])
        if widen and widens_itself:
            left, right = (parts[n] for n in op_table.matmul_factors(node))
            product = aten.mm.dtype if value.dim() == 2 else aten.bmm.dtype
            return self.builder.call(product, left, right, torch.float32)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: parts[n])
        built = self.builder.call(node.target, *args, **kwargs)
        if list(built.meta["val"].shape) != list(value.shape):
            raise CannotTake(node, f"its partial sum has shape {list(built.meta['val'].shape)}")
        return built

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.builder.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def _mask(self, node: fx.Node, spec: Spec) -> fx.Node:
        """Zero in rows that an earlier chunk has summed already."""
        value = node.meta["val"]
        shape = chunk_shape([1] * value.dim(), spec, self.chunk)
        valid = self.builder.call(aten.reshape.default, self.valid, shape)
        zero = self.builder.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
        return self.builder.call(aten.where.self, valid, node, zero)


def _sums_rows(node: fx.Node, operand: fx.Node, spec: Spec) -> bool:
    """Whether it sums features too: those first, in the kernels that go row by row anyway.

    In one step it would be one more reader of the chunk's logits, which Inductor would then keep.
    """
    value = operand.meta["val"]
    if node.target not in (aten.sum.default, aten.sum.dim_IntList) or value.dim() < 2:
        return False
    last = value.dim() - 1
    dims = [d % value.dim() for d in node.args[1]] if len(node.args) > 1 else [last]  # type: ignore[union-attr]
    return last in dims and last not in spec and value.dtype not in _LOW_PRECISION
