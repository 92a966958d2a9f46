"""Order nodes of a graph that have no data in common, so that Inductor keeps them in that order.

Inductor's own passes order collectives so: a node becomes a call of the op ``control_deps``, which
has the nodes to wait for among its inputs. Source:
torch/_inductor/fx_passes/control_dependencies.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.fx_passes.control_dependencies.preserve_node_ordering",
        "torch.utils._ordered_set.OrderedSet",
    ),
)


def make_wait(graph: fx.Graph, waits: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
    """Have each node wait for others, in place; the others come before it in the graph."""
    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in waits.items()})


def probe() -> None:
    APIS.require()
    graph = fx.Graph()
    x = graph.placeholder("x")
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    cosine = graph.call_function(torch.ops.aten.cos.default, (x,))
    for node in (x, sine, cosine):
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output((sine, cosine))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    make_wait(gm.graph, {cosine: [sine]})
    waiting = [node for node in gm.graph.nodes if {x, sine} <= set(node.all_input_nodes)]
    named = [node.name for node in waiting] == [cosine.name]
    APIS.expect(bool(waiting), "preserve_node_ordering does not make a node wait")
    APIS.expect(named, "preserve_node_ordering gives the node another name")
