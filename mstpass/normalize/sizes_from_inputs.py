"""Take every symbolic size from the inputs of the step instead of from a large value.

The backward of a slice, for instance, asks for the size of the sliced value with ``sym_size``. That
would keep the value alive, or keep it from becoming part of a loop. The size is rewritten as sums
and products of sizes that are inputs of the graph.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from mstpass.graph.builder import Builder, SizeNodes, UnknownSize, fake_mode_of
from mstpass.graph.joint import JointGraph


def sizes_from_inputs(joint: JointGraph) -> JointGraph:
    """A copy of the graph whose sizes come from its inputs; the graph itself if they do already."""
    names = [n.name for n in joint.nodes if n.target is torch.ops.aten.sym_size.int]
    if not names:
        return joint
    new = joint.copy()
    graph = new.module.graph
    sizes = SizeNodes.of_inputs(Builder(graph, fake_mode_of(new.nodes)))
    first = next(node for node in new.nodes if node.op != "placeholder")
    for name in names:
        node = new.by_name[name]
        with contextlib.suppress(UnknownSize), graph.inserting_before(first):
            (size,) = sizes.arguments([node.meta["val"]])
            fx.map_arg(size, node.replace_all_uses_with)
    graph.eliminate_dead_code()
    graph.lint()
    new.module.recompile()
    return JointGraph(new.module, new.num_fwd_outputs)
