"""Replace planned regions by ``mst_loop`` nodes: a new joint graph from an old one.

The new graph is written in the old one's order; a loop is written when its first result is
needed, after everything that it reads. Two loops that need each other's results cannot both be
written: ``CycleError`` names the plan to leave out.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of, map_values
from mstpass.graph.checkpoint_tags import META, tags_of
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.loop_op import STACK, SUM, OutputSpec, mst_loop
from mstpass.graph.recomputable import base_of
from mstpass.graph.sizes import Size, same_shape
from mstpass.graph.tokens import CannotTake, Spec
from mstpass.loops.body.build import build_body
from mstpass.loops.operand_layout import is_viewable, rows_of
from mstpass.plans import ChunkPlan, LoopOutput, LoopPlan
from mstpass.problem.problem import RECOMPUTED, UNFINISHED, loop_name, unfinished

aten = torch.ops.aten


class CycleError(Exception):
    def __init__(self, plan: ChunkPlan):
        super().__init__(f"the loops of {plan.source or plan.members[0][0]} need their own results")
        self.plan = plan


@dataclasses.dataclass(frozen=True)
class Applied:
    """The new joint graph, and the names in it of the old one's nodes.

    A loop's result goes by the node that it stands for; ``unfinished(name)`` is what the loop
    returns where that is scaled or cast afterwards.
    """

    module: fx.GraphModule
    names: Mapping[str, str]

    def old_names(self) -> dict[str, str]:
        """The old graph's names of the new one's nodes.

        What is unfinished goes by the node that it becomes, a loop by ``"loop:"`` and the first
        node that it returns, as in the partition problem.
        """
        found = {new: old.removesuffix(UNFINISHED) for old, new in self.names.items()}
        for node in self.module.graph.nodes:
            if node.target is mst_loop:
                items = (user for user in node.users if user.name in found)
                first = min(items, key=lambda user: user.args[1], default=None)
                if first is not None:
                    found[node.name] = loop_name(found[first.name])
        return found


def apply_plans(
    joint: JointGraph, plans: Sequence[ChunkPlan], accumulate: str = "float32"
) -> Applied:
    """A new joint graph module with every plan's loops in it; the old one is left as it is.

    Raises:
        CycleError: a plan's loops depend on themselves through other nodes.
        CannotTake: a loop's body cannot be built.
    """
    writer = _Writer(joint, plans, accumulate)
    return Applied(writer.write(), writer.names())


Task = fx.Node | LoopPlan


class _Writer:
    def __init__(self, joint: JointGraph, plans: Sequence[ChunkPlan], accumulate: str):
        self.joint, self.accumulate = joint, accumulate
        self.tags = tags_of(joint).of
        self.graph = fx.Graph()
        self.builder = Builder(self.graph, fake_mode_of(joint.nodes))
        self.sizes = SizeNodes(self.builder)
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.raw: dict[fx.Node, fx.Node] = {}  # loop results before scaling and casting
        self.written: set[int] = set()
        self.bodies: dict[str, str] = {}
        self.plan_of = {id(loop): plan for plan in plans for loop in plan.loops}
        self.producers: dict[fx.Node, tuple[LoopPlan, LoopOutput]] = {}
        for plan in plans:
            for loop in plan.loops:
                for item in loop.outputs:
                    self.producers.setdefault(joint.by_name[item.node], (loop, item))

    def write(self) -> fx.GraphModule:
        for name, child in self.joint.module.named_children():
            setattr(self.root, name, child)
        for node in self.joint.nodes:
            if node.op == "placeholder":
                self.env[node] = self.graph.node_copy(node)
                self.sizes.learn(self.env[node])
        live = self._live()
        for node in self.joint.nodes:  # the old order, so that writes stay behind reads
            if node in live:
                self._require(node)
        module = fx.GraphModule(self.root, self.graph)
        module.meta = dict(self.joint.module.meta)
        self.graph.lint()
        return module

    def names(self) -> dict[str, str]:
        names = {old.name: new.name for old, new in self.env.items()}
        for node, result in self.raw.items():
            loop, item = self.producers[node]
            value = value_of(node)
            cast = value is not None and result.meta["val"].dtype != value.dtype
            finished = cast or (item.scaled and loop.unit)
            names[unfinished(node.name) if finished else node.name] = result.name
        return names

    # ---- order ---------------------------------------------------------------------------------
    def _deps(self, task: Task) -> list[Task]:
        if isinstance(task, LoopPlan):
            nodes = [self.joint.by_name[item.node] for item in task.inputs]
            prelude = {self.joint.by_name[name] for name in task.prelude}
            nodes += [i for node in prelude for i in node.all_input_nodes if i.name != task.unit]
            return [node for node in nodes if node not in prelude]
        if task not in self.producers:
            return list(task.all_input_nodes)
        loop, item = self.producers[task]
        unit = [self.joint.by_name[loop.unit]] if item.scaled and loop.unit else []
        return [loop, *unit]

    def _done(self, task: Task) -> bool:
        return id(task) in self.written if isinstance(task, LoopPlan) else task in self.env

    def _live(self) -> set[fx.Node]:
        stack: list[Task] = [n for n in self.joint.nodes if n.op == "output" or n.is_impure()]
        seen: set[int] = set()
        found: set[fx.Node] = set()
        while stack:
            task = stack.pop()
            if id(task) not in seen:
                seen.add(id(task))
                if isinstance(task, fx.Node):
                    found.add(task)
                stack.extend(self._deps(task))
        return found

    def _require(self, target: Task) -> None:
        """Write a task after all that it needs, without recursion (graphs are deep)."""
        stack: list[Task] = [target]
        path: dict[int, Task] = {}
        while stack:
            task = stack[-1]
            missing = [] if self._done(task) else [t for t in self._deps(task) if not self._done(t)]
            for other in missing:
                if id(other) in path or other is task:
                    raise CycleError(self._guilty([*path.values(), task]))
            if missing:
                path[id(task)] = task
                stack.extend(reversed(missing))
                continue
            stack.pop()
            path.pop(id(task), None)
            if not self._done(task):
                self._write(task)

    def _guilty(self, path: list[Task]) -> ChunkPlan:
        loops = [t for t in path if isinstance(t, LoopPlan)]
        return self.plan_of[id(loops[-1])]

    def _write(self, task: Task) -> None:
        try:
            self._write_task(task)
        except UnknownSize as error:
            member = self.joint.by_name[task.members[0]] if isinstance(task, LoopPlan) else task
            raise CannotTake(member, str(error)) from None

    def _write_task(self, task: Task) -> None:
        if isinstance(task, LoopPlan):
            self._write_loop(self.plan_of[id(task)], task)
            self.written.add(id(task))
        elif task in self.producers:
            self.env[task] = self._finish(task, *self.producers[task])
        else:
            self.env[task] = self.graph.node_copy(task, self.env.__getitem__)
            self.sizes.learn(self.env[task])

    # ---- one loop ------------------------------------------------------------------------------
    def _write_loop(self, plan: ChunkPlan, loop: LoopPlan) -> None:
        env = self._prelude(loop)
        inputs = [(self.joint.by_name[item.node], item.spec) for item in loop.inputs]
        sliced = [self._rows(env[node], spec) for node, spec in inputs if spec]
        whole = [env[node] for node, spec in inputs if not spec]
        body_name, parts = self._body(plan, loop)
        specs = tuple(
            self._output_spec(item, part) for item, part in zip(loop.outputs, parts, strict=True)
        )
        (num_tokens,) = self.sizes.arguments(sliced[0].meta["val"].shape[:1])
        sizes = (None if plan.symbolic else plan.num_chunks, plan.chunk_tokens, num_tokens)
        body = self.graph.get_attr(body_name)
        args = (body, *sizes, specs, tuple(sliced), tuple(whole))
        call = self.graph.call_function(mst_loop, args)
        device = (*sliced, *whole)[0].meta["val"].device
        shapes: Any = map_values([shape for _, shape, _ in specs])
        with self.builder.mode:
            call.meta["val"] = tuple(
                torch.empty(shape, dtype=dtype, device=device)
                for shape, (_, _, dtype) in zip(shapes, specs, strict=True)
            )
        tags = self._tags(loop)
        call.meta.update(tags)
        for position, item in enumerate(loop.outputs):
            result = self.builder.call(operator.getitem, call, position)
            result.meta.update(tags)
            self.raw[self.joint.by_name[item.node]] = result

    def _tags(self, loop: LoopPlan) -> dict[str, Any]:
        """Those of its results, where the user's checkpointing wants all of them recomputed."""
        nodes = [self.joint.by_name[item.node] for item in loop.outputs]
        if any(self.tags.get(base_of(node), "") not in RECOMPUTED for node in nodes):
            return {}
        return {key: nodes[0].meta[key] for key in META if key in nodes[0].meta}

    def _prelude(self, loop: LoopPlan) -> Mapping[fx.Node, fx.Node]:
        """The written nodes, with the prelude's as they are for a unit of 1."""
        if not loop.prelude or loop.unit is None:
            return self.env
        unit = self.joint.by_name[loop.unit]
        value = unit.meta["val"]
        one = self.builder.call(
            aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device
        )
        env = {**self.env, unit: one}
        for name in loop.prelude:
            node = self.joint.by_name[name]
            copy = self.graph.node_copy(node, env.__getitem__)
            env[node] = copy
        return env

    def _body(self, plan: ChunkPlan, loop: LoopPlan) -> tuple[str, list[torch.Tensor]]:
        """Build the body. Loops that compute the same share one, so that it compiles once."""
        graph = fx.Graph()
        parts = build_body(
            self.joint, plan, loop, Builder(graph, self.builder.mode), self.accumulate
        )
        inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        key = f"{graph} {[_layout(value) for value in inputs]}"
        if key not in self.bodies:
            name = f"mst_body_{len(self.bodies)}"
            setattr(self.root, name, fx.GraphModule(torch.nn.Module(), graph))
            self.bodies[key] = name
        return self.bodies[key], [part.meta["val"] for part in parts]

    def _output_spec(self, item: LoopOutput, part: torch.Tensor) -> OutputSpec:
        if item.spec is None:
            return SUM, tuple(part.shape), part.dtype
        value = value_of(self.joint.by_name[item.node])
        assert value is not None
        tokens = self.sizes.arguments([math.prod(value.shape[d] for d in item.spec)])
        return STACK, (*tokens, *part.shape[1:]), part.dtype

    def _rows(self, built: fx.Node, spec: Spec) -> fx.Node:
        """A value as ``[N, rest]``, tokens first."""
        order, shape = rows_of(built.meta["val"], spec)
        if order != sorted(order):
            built = self.builder.call(aten.permute.default, built, order)
        return self._reshaped(built, shape)

    def _reshaped(self, node: fx.Node, shape: list[Size]) -> fx.Node:
        value = node.meta["val"]
        if same_shape(value.shape, shape):
            return node
        if not is_viewable(value, shape):
            node = self.builder.call(
                aten.clone.default, node, memory_format=torch.contiguous_format
            )
        return self.builder.call(aten.view.default, node, self.sizes.arguments(shape))

    def _finish(self, node: fx.Node, loop: LoopPlan, item: LoopOutput) -> fx.Node:
        """A loop's result as the value it stands for: scaled, cast, its dims in their places."""
        built = self.raw[node]
        value = value_of(node)
        assert value is not None
        if item.scaled and loop.unit:
            unit = self._reshaped(self.env[self.joint.by_name[loop.unit]], [])
            built = self.builder.call(aten.mul.Tensor, built, unit)
        if built.meta["val"].dtype != value.dtype:
            cast = torch.ops.prims.convert_element_type.default
            built = self.builder.call(cast, built, value.dtype)
        if item.spec is not None:
            spec = item.spec
            rest = [d for d in range(value.dim()) if d not in spec]
            order = [*spec, *rest]
            built = self._reshaped(built, [value.shape[d] for d in order])
            if order != sorted(order):
                back = [order.index(d) for d in range(len(order))]
                built = self.builder.call(aten.permute.default, built, back)
        if not same_shape(built.meta["val"].shape, value.shape):
            raise CannotTake(node, f"the loop returns {tuple(built.meta['val'].shape)}")
        for key in ("seq_nr", "partitioner_tag", "stack_trace", "nn_module_stack", *META):
            if key in node.meta:
                built.meta[key] = node.meta[key]
        return built


def _layout(value: torch.Tensor | int) -> object:
    if isinstance(value, int):
        return int
    return value.dtype, tuple(value.shape), value.stride(), value.device
