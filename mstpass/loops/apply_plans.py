"""Put the planned loops into the joint graph: a new graph from an old one.

Each loop becomes one ``mst_loop`` node (graph/loop_op.py) in the place of its members::

    for node in the old graph, in its order:
        if a loop returns the node: write the loop first, unless it is written, then its result
        otherwise:                  copy the node
        ... each after all that it reads

    results that are needed by no output are not written, and neither are their loops

The old order is kept, so that an op that writes to a value stays after those that read it before,
and so that all ranks run their collectives in one order, whatever loops each of them has.
If two loops need each other's results, neither can come first: one has to be left out.
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
from mstpass.loops.write_loop import LoopWriter, operands_of
from mstpass.plans import ChunkPlan, LoopOutput, LoopPlan
from mstpass.torch_internals.graphs import graph_module
from mstpass.walk import CircleError, needed_first, walk_once

_OWN_RESULTS = REPORT("its loop would read values made from its own results")


def apply_plans(joint: JointGraph, plans: Sequence[ChunkPlan]) -> JointGraph:
    """A new joint graph with the loops of all plans. The old one does not change.

    All nodes that are left have their names, and a loop and its results those of the partition
    problem (``problem.node_name``).

    Raises:
        CannotTake: the body of a loop cannot be built, or a loop depends on its own results,
            through nodes outside of it.
    """
    return JointGraph(_GraphWriter(joint, plans).write(), joint.num_fwd_outputs)


class _GraphWriter:
    """Writes the new graph, each node after those that it depends on."""

    def __init__(self, joint: JointGraph, plans: Sequence[ChunkPlan]):
        self.joint = joint
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        builder = Builder(self.graph, fake_mode_of(joint.nodes), ADDED)
        self.sizes = SizeNodes(builder)
        self.loops = LoopWriter(joint, builder, self.sizes, self.root)
        self.env: dict[fx.Node, fx.Node] = {}  # new nodes by the old ones that they stand for
        self.results: dict[fx.Node, fx.Node] = {}  # the same for what loops return, unfinished
        self.renewal = Renewal(self.graph)
        self.plans = plans
        self.producers: dict[fx.Node, tuple[LoopPlan, LoopOutput]] = {}
        for loop in (loop for plan in plans for loop in plan.loops):
            # as in problem/apply_modes.py: of what several loops compute, the first returns it
            items = {joint.by_name[item.node]: item for item in loop.outputs}
            own = {node: item for node, item in items.items() if node not in self.producers}
            loop = dataclasses.replace(loop, outputs=tuple(own.values()))
            self.producers.update((node, (loop, item)) for node, item in own.items())
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
        targets = [node for node in self.joint.nodes if node in needed]
        try:
            for target in targets:
                for node in needed_first(target, self._needs, self.env):
                    self._write(node)
        except CircleError as circle:
            loops = [self.producers[node][0] for node in circle.path if node in self.producers]
            raise CannotTake(self.joint.by_name[loops[-1].members[0]], _OWN_RESULTS) from None
        module = graph_module(self.root, self.graph)
        module.meta = dict(self.joint.module.meta)
        self.graph.lint()
        return module

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        if node not in self.producers:
            earlier = [self.earlier[node]] if node in self.earlier else []
            return [*node.all_input_nodes, *earlier]
        loop, item = self.producers[node]
        unit = [self.joint.by_name[loop.unit]] if item.scaled and loop.unit else []
        return [*operands_of(self.joint, loop), *unit]

    def _needed(self) -> set[fx.Node]:
        """The nodes that the graph's output or an op with side effects depends on."""
        # Attention counts as impure, because it might draw random numbers; in a loop it does not.
        members = {name for plan in self.plans for name, _ in plan.members}
        needed = (
            node
            for node in self.joint.nodes
            if node.op == "output" or (node.is_impure() and node.name not in members)
        )
        return set(walk_once(needed, self._needs))

    def _write(self, node: fx.Node) -> None:
        loop, item = self.producers.get(node, (None, None))
        try:
            if loop is not None and item is not None:
                if node not in self.results:
                    self.results |= self.loops.write(loop, self.env)
                self.env[node] = self.loops.finish(self.results[node], loop, item, self.env)
                self.renewal.replaced(node, self.env[node])  # a loop over heads has them first
            elif node is self.joint.output:
                laid_out = {
                    n: self.renewal.with_layout_of(self.env[n], n) for n in node.all_input_nodes
                }
                self.env[node] = self.graph.node_copy(node, laid_out.__getitem__)
            else:
                self.env[node] = copied = self.graph.node_copy(node, self.env.__getitem__)
                self.renewal.renew(copied)
                self.sizes.learn(copied)
        except (UnknownSize, CannotRenew) as error:
            at = self.joint.by_name[loop.members[0]] if loop is not None else node
            raise CannotTake(at, REPORT(str(error))) from None
