"""Take every symbolic size from the inputs of the step instead of from a large value.

The backward of a slice, for instance, asks for the size of the sliced value with ``sym_size``. That
would keep the value alive, or keep it from becoming part of a loop. The size is rewritten as sums
and products of sizes that are inputs of the graph.
"""

from __future__ import annotations

import torch
from torch import fx

from mstpass.graph.joint import JointGraph
from mstpass.graph.rewriting import Rewriting, Rewritten, rewritten


def sizes_from_inputs(joint: JointGraph) -> Rewritten:
    """A copy of the graph whose sizes come from its inputs, which changes no region.

    The graph itself if they do already.
    """
    found = (node for node in joint.nodes if node.target is torch.ops.aten.sym_size.int)
    return rewritten(joint, found, _from_inputs)


def _from_inputs(rewriting: Rewriting, node: fx.Node) -> None:
    first = next(other for other in rewriting.joint.nodes if other.op != "placeholder")
    with rewriting.graph.inserting_before(first):
        (size,) = rewriting.sizes.arguments([node.meta["val"]])
    if isinstance(size, fx.Node):
        rewriting.replace(node, size)
