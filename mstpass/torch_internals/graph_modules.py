"""Graph modules that write their Python code when it is first needed.

To write and compile the code of a graph takes longer than to build the graph. Most of ours are
planned, split or lowered next, and nobody calls them. Source: torch/fx/_lazy_graph_module.py, which
Inductor uses in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(names=("torch.fx._lazy_graph_module._LazyGraphModule",))


def graph_module(root: torch.nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """The module of a graph, with what the graph's ``get_attr`` nodes name in ``root``."""
    return _LazyGraphModule(root if isinstance(root, torch.nn.Module) else dict(root), graph)


def probe() -> None:
    """A graph that has changed is run as it is now."""
    APIS.require()
    graph = fx.Graph()
    given = graph.placeholder("given")
    output = graph.output(given)
    module = graph_module({}, graph)
    before = module(torch.ones(()))
    with graph.inserting_before(output):
        output.args = (graph.call_function(torch.neg, (given,)),)
    module.recompile()
    APIS.expect(
        float(before) == 1.0 and float(module(torch.ones(()))) == -1.0,
        "a lazy graph module runs an earlier state of its graph",
    )
