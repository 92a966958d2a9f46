"""Write one loop into a joint graph: the ``mst_loop`` node, its operands, and its results.

The nodes of a loop, in order::

    prelude    of a fused loop: written once more, with 1 in place of the unit; once for all loops
    operands   sliced inputs as [N, rest], tokens or heads first; whole inputs as they are
    mst_loop   one node; loops with equal bodies share one body module
    results    one getitem each; then times the unit, cast, and its dims in the node's order
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.advice import REPORT
from mstpass.graph.axes import TOKEN_AXIS, Axis, axis_of
from mstpass.graph.builder import Builder, SizeNodes, fake_values
from mstpass.graph.joint import JointGraph
from mstpass.graph.loop_op import OVER, STACK, SUM, Kind, OutputSpec, mst_loop
from mstpass.graph.node_meta import inside_meta, origin_meta, policy_meta, replacement_meta
from mstpass.graph.recompute_rules import policies_of, tag_of
from mstpass.graph.renew_values import Renewal
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.tokens import CannotTake, Spec
from mstpass.loops.body.build import build_body
from mstpass.loops.body.key import body_key
from mstpass.loops.operand_layout import is_literal, is_viewable, layout_of
from mstpass.plans import FLOAT32, LoopOutput, LoopPlan
from mstpass.problem.names import at_one, loop_name, unfinished
from mstpass.problem.problem import RECOMPUTED
from mstpass.torch_internals.graphs import graph_module, rename

aten = torch.ops.aten

Env = Mapping[fx.Node, fx.Node]  # new nodes by the old ones that they stand for


def inputs_of(joint: JointGraph, loop: LoopPlan) -> list[fx.Node]:
    """What a loop reads. Literals are in the loop's body."""
    inputs = ((joint.by_name[item.node], item.spec) for item in loop.inputs)
    return list(dict.fromkeys(node for node, spec in inputs if spec or not is_literal(node)))


def operands_of(joint: JointGraph, loop: LoopPlan) -> list[fx.Node]:
    """The same; in place of nodes of the prelude, what the prelude reads."""
    prelude = [joint.by_name[name] for name in loop.prelude]
    found = inputs_of(joint, loop)
    found += [n for node in prelude for n in node.all_input_nodes if n.name != loop.unit]
    return [node for node in dict.fromkeys(found) if node not in prelude]


class LoopWriter:
    """Writes the loops of one joint graph at the end of the builder's graph."""

    def __init__(
        self,
        joint: JointGraph,
        builder: Builder,
        sizes: SizeNodes,
        root: torch.nn.Module,
    ):
        self.joint, self.builder, self.sizes = joint, builder, sizes
        self.root = root
        self.tags = policies_of(joint).tags
        self.bodies: dict[str, tuple[str, list[torch.dtype]]] = {}  # by their ``body_key``
        self.modules: dict[str, str] = {}  # names of body modules, by what they compute
        self.at_one: dict[fx.Node, fx.Node] = {}  # the nodes of preludes, for a unit of 1
        self.renewal = Renewal(builder.graph)

    def write(self, loop: LoopPlan, env: Env) -> dict[fx.Node, fx.Node]:
        """The loop's results, unfinished, by the old nodes that they stand for."""
        env = self._with_prelude(loop, env)
        inputs = [(self.joint.by_name[item.node], item.spec) for item in loop.inputs]
        chunks = loop.cut
        axis = axis_of(chunks.axis, chunks.total)
        inside = self._inside_meta(loop)
        for node, spec in inputs:  # a number of rows that the data decides is no input
            for dim in spec if axis is TOKEN_AXIS else ():
                self.sizes.learn_dim(env[node], dim)
        sliced = [self._as_rows(env[node], spec, axis, inside) for node, spec in inputs if spec]
        whole = [env[node] for node, spec in inputs if not spec and not is_literal(node)]
        body, dtypes = self._body(loop)
        specs = tuple(
            self._output_spec(axis, loop, item, dtype)
            for item, dtype in zip(loop.outputs, dtypes, strict=True)
        )
        (num_tokens,) = self.sizes.arguments(sliced[0].meta["val"].shape[:1])
        sizes = (None if chunks.symbolic else chunks.count, chunks.length, num_tokens)
        module = self.builder.graph.get_attr(body)
        args = (module, *sizes, specs, tuple(sliced), tuple(whole))
        name = loop_name(loop.outputs[0].node)
        call = self.builder.graph.create_node("call_function", mst_loop, args, name=name)
        with self.builder.mode:
            call.meta["val"] = mst_loop(None, *fake_values(args[1:]))
        tags = self._checkpoint_meta(loop)
        call.meta.update(tags or inside)
        results: dict[fx.Node, fx.Node] = {}
        for position, item in enumerate(loop.outputs):
            result = self.builder.call(operator.getitem, call, position)
            result.meta.update(tags)
            rename(result, unfinished(item.node))
            results[self.joint.by_name[item.node]] = result
        return results

    def _with_prelude(self, loop: LoopPlan, env: Env) -> Env:
        """The new nodes, with those of the prelude computed from a unit of 1."""
        if not loop.prelude or loop.unit is None:
            return env
        for name in (loop.unit, *loop.prelude):
            node = self.joint.by_name[name]
            if node in self.at_one:
                continue
            if name == loop.unit:
                value = node.meta["val"]
                copy = self.builder.filled(value.shape, 1, value)
                self.renewal.replaced(node, copy)
            else:
                copy = self.builder.copy(node, {**env, **self.at_one}.__getitem__)
                self.renewal.renew(copy)
            rename(copy, at_one(name))
            self.at_one[node] = copy
        return {**env, **self.at_one}

    def _body(self, loop: LoopPlan) -> tuple[str, list[torch.dtype]]:
        """The name of the body's module, and the dtype of each result of the body.

        Equal bodies are built, and compiled, once.
        """
        key = body_key(self.joint, loop)
        if key not in self.bodies:
            graph = fx.Graph()
            parts = build_body(self.joint, loop, Builder(graph, self.builder.mode))
            inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
            layouts = [int if isinstance(v, int) else layout_of(v) for v in inputs]
            code = f"{graph} {layouts}"
            if code not in self.modules:  # loops over different nodes may have the same body
                self.modules[code] = f"mst_body_{len(self.modules)}"
                subgraphs = {str(n.target): n.meta["val"] for n in graph.find_nodes(op="get_attr")}
                setattr(self.root, self.modules[code], graph_module(subgraphs, graph))
            self.bodies[key] = self.modules[code], [part.meta["val"].dtype for part in parts]
        return self.bodies[key]

    def _output_spec(
        self, axis: Axis, loop: LoopPlan, item: LoopOutput, dtype: torch.dtype
    ) -> OutputSpec:
        """An output in the dtype of the body's result, or in that of the node."""
        value = self.joint.by_name[item.node].meta["val"]
        dtype = dtype if loop.accumulate == FLOAT32 else value.dtype
        if item.spec is None:
            names = [output.node for output in loop.outputs]
            relative = bool(item.relative_to)
            kind: Kind = (SUM, names.index(item.relative_to)) if relative else item.combine
            return kind, tuple(self.sizes.arguments(value.shape)), dtype
        shape, dim = axis.stacked(value.shape, item.spec)
        rows = [operand.node for operand in loop.inputs if operand.spec]
        kind = (OVER, rows.index(item.over)) if item.over else (STACK, dim) if dim else STACK
        return kind, tuple(self.sizes.arguments(shape)), dtype

    def _checkpoint_meta(self, loop: LoopPlan) -> dict[str, Any]:
        """The checkpointing metadata of the results, if it asks to recompute all of them."""
        nodes = [self.joint.by_name[item.node] for item in loop.outputs]
        if any(self.tags.get(ops.base_of(node), "") not in RECOMPUTED for node in nodes):
            return {}
        return policy_meta(nodes[0])

    def _inside_meta(self, loop: LoopPlan) -> dict[str, Any]:
        """The checkpointed region that all results of the loop are in; empty if there is none."""
        found = [inside_meta(self.joint.by_name[item.node]) for item in loop.outputs]
        return found[0] if all(meta == found[0] for meta in found) else {}

    # ---- layouts -------------------------------------------------------------------------------
    # ``meta`` is that of the new nodes: the checkpointed region that they are inside of.
    def _as_rows(self, built: fx.Node, spec: Spec, axis: Axis, meta: dict[str, Any]) -> fx.Node:
        """The value as ``[N, rest]``."""
        layout = axis.rows(built.meta["val"].shape, spec)
        built = self._reshaped(built, layout.apart, meta)
        built = self._permuted(built, layout.order, layout.order, meta)
        return self._reshaped(built, layout.shape, meta)

    def _permuted(
        self, node: fx.Node, order: list[int], dims: list[int], meta: dict[str, Any]
    ) -> fx.Node:
        """The value with its dims permuted, unless ``order`` says that they are in order."""
        if order == sorted(order):
            return node
        return self._call(meta, aten.permute.default, node, dims)

    def _reshaped(self, node: fx.Node, shape: Sequence[Size], meta: dict[str, Any]) -> fx.Node:
        """The value in a shape: a view if its strides allow one, else a copy."""
        value = node.meta["val"]
        if same_shape(value.shape, shape):
            return node
        if not is_viewable(value, shape):
            node = self._call(meta, aten.clone.default, node, memory_format=torch.contiguous_format)
        return self._call(meta, aten.view.default, node, self.sizes.arguments(shape))

    def _call(self, meta: dict[str, Any], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.builder.call(target, *args, **kwargs)
        node.meta.update(meta)
        return node

    # ---- results -------------------------------------------------------------------------------
    def finish(self, result: fx.Node, loop: LoopPlan, item: LoopOutput, env: Env) -> fx.Node:
        """A result as the node that it stands for: scaled, cast, its dims in their places.

        It has the name of that node.
        """
        node = self.joint.by_name[item.node]
        value = node.meta["val"]
        inside = inside_meta(node)
        if item.scaled and loop.unit:
            unit = self._reshaped(env[self.joint.by_name[loop.unit]], [], {})
            result = self.builder.call(aten.mul.Tensor, result, unit)
        if result.meta["val"].dtype != value.dtype:
            cast = torch.ops.prims.convert_element_type.default
            result = self.builder.call(cast, result, value.dtype)
        if item.spec is not None:
            axis = axis_of(loop.cut.axis, loop.cut.total)
            if axis.stacked(value.shape, item.spec)[1] == 0:
                layout = axis.rows(value.shape, item.spec)
                result = self._reshaped(result, layout.ordered, inside)
                result = self._permuted(result, layout.order, layout.inverse, inside)
            result = self._reshaped(result, value.shape, inside)
        shape = result.meta["val"].shape
        if not same_shape(shape, value.shape):
            reason = f"the loop returns shape {tuple(shape)}, not {tuple(value.shape)}"
            raise CannotTake(node, REPORT(reason))
        result.meta.update(self._meta(result, node))
        rename(result, node.name)
        return result

    def _meta(self, result: fx.Node, node: fx.Node) -> dict[str, Any]:
        """The metadata of a result, which is the loop's item itself or computed from it.

        An item is recomputed with its loop or not at all. Torch's partitioner finds no cut where
        only the item asks for it.
        """
        is_item = result.target is operator.getitem
        if is_item and not policy_meta(result) and tag_of(node) in RECOMPUTED:
            return origin_meta(node)
        return replacement_meta(node)
