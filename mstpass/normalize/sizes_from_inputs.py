"""Take every symbolic size from the inputs of the step instead of from a large value.

The backward of a slice, for instance, asks for the size of the sliced value with ``sym_size``. That
would keep the value alive, or keep it from becoming part of a loop. The size is rewritten as sums
and products of sizes that are inputs of the graph.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import JointGraph
from mstpass.graph.rewriting import Rewriting, Rewritten


def sizes_from_inputs(joint: JointGraph) -> Rewritten:
    """A copy of the graph whose sizes come from its inputs, which changes no region.

    The graph itself if they do already.
    """
    names = [n.name for n in joint.nodes if n.target is torch.ops.aten.sym_size.int]
    if not names:
        return joint, frozenset()
    rewriting = Rewriting(joint)
    new = rewriting.joint
    first = next(node for node in new.nodes if node.op != "placeholder")
    for name in names:
        node = new.by_name[name]
        with contextlib.suppress(UnknownSize), rewriting.graph.inserting_before(first):
            (size,) = rewriting.sizes.arguments([node.meta["val"]])
            if isinstance(size, fx.Node):
                rewriting.replace(node, size)
    return rewriting.finished(), frozenset()
