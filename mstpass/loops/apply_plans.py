"""Put the planned loops into the joint graph: a new graph from an old one.

Each loop becomes one ``mst_loop`` node (graph/loop_op.py) in the place of its members::

    for node in the old graph, in its order:
        if a loop returns the node: write the loop first, unless it is written, then its result
        otherwise:                  copy the node
        ... each after all that it reads

    results that are needed by no output are not written, and neither are their loops

The old order is kept, so that an op that writes to a value stays after those that read it before,
and so that all ranks run their collectives in one order, whatever loops each of them has.
If two loops need each other's results, neither can come first: ``CycleError`` names a plan that has
to be left out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import fx

from mstpass.graph.advice import REPORT
from mstpass.graph.builder import ADDED, Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.collectives import collectives_of
from mstpass.graph.joint import JointGraph
from mstpass.graph.renew_values import CannotRenew, Renewal
from mstpass.graph.tokens import CannotTake
from mstpass.loops.write_loop import LoopWriter
from mstpass.plans import ChunkPlan, LoopOutput, LoopPlan
from mstpass.problem.apply_modes import DependencyCycle, dependency_order
from mstpass.problem.problem import loop_name
from mstpass.torch_internals.graphs import graph_module
from mstpass.walk import walk_once


class CycleError(Exception):
    """The loops of a plan depend on their own results, through nodes outside of them."""

    def __init__(self, plan: ChunkPlan):
        region = plan.source or plan.members[0][0]
        super().__init__(f"the loops of {region} would read values made from their own results")
        self.plan = plan


def apply_plans(joint: JointGraph, plans: Sequence[ChunkPlan]) -> JointGraph:
    """A new joint graph with the loops of all plans. The old one does not change.

    All nodes that are left have their names, and a loop and its results those of the partition
    problem (``problem.node_name``).

    Raises:
        CycleError: the loops of a plan depend on their own results.
        CannotTake: the body of a loop cannot be built.
    """
    return JointGraph(_GraphWriter(joint, plans).write(), joint.num_fwd_outputs)


_Task = fx.Node | str  # what is written as a whole: a node of the old graph, or a loop by its name


class _GraphWriter:
    """Writes the new graph, each task after those that it depends on."""

    def __init__(self, joint: JointGraph, plans: Sequence[ChunkPlan]):
        self.joint = joint
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        builder = Builder(self.graph, fake_mode_of(joint.nodes), ADDED)
        self.sizes = SizeNodes(builder)
        self.loops = LoopWriter(joint, builder, self.sizes, self.root)
        self.env: dict[fx.Node, fx.Node] = {}  # new nodes by the old ones that they stand for
        self.results: dict[fx.Node, fx.Node] = {}  # the same for what loops return, unfinished
        self.written: set[str] = set()  # names of loops
        self.renewal = Renewal(self.graph)
        self.loop_of: dict[str, tuple[ChunkPlan, LoopPlan]] = {}
        self.producers: dict[fx.Node, tuple[str, LoopOutput]] = {}
        for chunk_plan, loop in ((each, loop) for each in plans for loop in each.loops):
            name = loop_name(loop.outputs[0].node)
            # as in problem/apply_modes.py: of what several loops compute, the first returns it
            own = [item for item in loop.outputs if joint.by_name[item.node] not in self.producers]
            self.loop_of[name] = chunk_plan, dataclasses.replace(loop, outputs=tuple(own))
            self.producers.update((joint.by_name[item.node], (name, item)) for item in own)
        collectives = joint.cached(collectives_of)
        self.earlier = dict(itertools.pairwise(reversed(collectives)))  # the collective before each

    def write(self) -> fx.GraphModule:
        for name, child in self.joint.module.named_children():
            setattr(self.root, name, child)
        for node in self.joint.nodes:
            if node.op == "get_attr" and not hasattr(self.root, str(node.target)):  # a constant
                setattr(self.root, str(node.target), getattr(self.joint.module, str(node.target)))
            if node.op == "placeholder":
                self.env[node] = self.graph.node_copy(node)
                self.sizes.learn(self.env[node])
        needed = self._needed()
        targets: list[_Task] = [node for node in self.joint.nodes if node in needed]
        try:
            for task in dependency_order(targets, self._dependencies, self._is_written):
                self._write(task)
        except DependencyCycle as cycle:
            loops = [task for task in cycle.path if isinstance(task, str)]
            raise CycleError(self.loop_of[loops[-1]][0]) from None
        module = graph_module(self.root, self.graph)
        module.meta = dict(self.joint.module.meta)
        self.graph.lint()
        return module

    # ---- order ---------------------------------------------------------------------------------
    def _dependencies(self, task: _Task) -> list[_Task]:
        if isinstance(task, str):
            _, loop = self.loop_of[task]
            nodes = [self.joint.by_name[item.node] for item in loop.inputs]
            prelude = {self.joint.by_name[name] for name in loop.prelude}
            nodes += [i for node in prelude for i in node.all_input_nodes if i.name != loop.unit]
            return [node for node in nodes if node not in prelude]
        if task not in self.producers:
            earlier = [self.earlier[task]] if task in self.earlier else []
            return [*task.all_input_nodes, *earlier]
        name, item = self.producers[task]
        _, loop = self.loop_of[name]
        unit = [self.joint.by_name[loop.unit]] if item.scaled and loop.unit else []
        return [name, *unit]

    def _is_written(self, task: _Task) -> bool:
        return task in self.written if isinstance(task, str) else task in self.env

    def _needed(self) -> set[_Task]:
        """The nodes and loops that the graph's output or an op with side effects depends on."""
        # Attention counts as impure, because it might draw random numbers; in a loop it does not.
        members = {name for plan, _ in self.loop_of.values() for name, _ in plan.members}
        needed: list[_Task] = [
            node
            for node in self.joint.nodes
            if node.op == "output" or (node.is_impure() and node.name not in members)
        ]
        return set(walk_once(needed, self._dependencies))

    # ---- tasks ---------------------------------------------------------------------------------
    def _write(self, task: _Task) -> None:
        try:
            self._write_task(task)
        except (UnknownSize, CannotRenew) as error:
            first = self.loop_of[task][1].members[0] if isinstance(task, str) else task.name
            raise CannotTake(self.joint.by_name[first], REPORT(str(error))) from None

    def _write_task(self, task: _Task) -> None:
        if isinstance(task, str):
            _, loop = self.loop_of[task]
            self.results |= self.loops.write(loop, self.env)
            self.written.add(task)
        elif task in self.producers:
            name, item = self.producers[task]
            _, loop = self.loop_of[name]
            result = self.loops.finish(self.results[task], loop, item, self.env)
            self.env[task] = result
            self.renewal.replaced(task, result)  # heads come first where a loop is over heads
        elif task is self.joint.output:
            results = {n: self.renewal.with_layout_of(self.env[n], n) for n in task.all_input_nodes}
            self.env[task] = self.graph.node_copy(task, results.__getitem__)
        else:
            self.env[task] = copied = self.graph.node_copy(task, self.env.__getitem__)
            self.renewal.renew(copied)
            self.sizes.learn(copied)
