"""Keep Inductor from overwriting a loop's operands as if they were donated to the backward.

A *donated* buffer is a saved value that backward may overwrite; torch lists them by the position
of backward's inputs. Up to torch 2.14 Inductor looks up the inputs of every subgraph in the same
list, a loop's body among them, and may overwrite a weight there (pytorch #153679, #192840; source:
``GraphLowering.placeholder`` in torch/_inductor/graph.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._guards.TracingContext.try_get",
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs",
        "torch._inductor.graph.SubgraphLowering",
        "torch._inductor.utils.get_donated_idxs",
        "torch._inductor.virtualized.V",
    ),
)


class _OfNoSubgraph(list[int]):
    """Positions among the inputs of a graph; none is found while a subgraph is lowered."""

    def __contains__(self, position: object) -> bool:
        return not isinstance(V.graph, SubgraphLowering) and super().__contains__(position)

    def __reduce__(self) -> Any:  # the compile caches read it without this project
        return list, (list(self),)


def keep_donations_from_subgraphs(graph: fx.Graph) -> None:
    """Let the donations of a backward that Inductor compiles now hold for its own inputs alone."""
    if not is_backward(graph) or torch.__version__ >= "2.15":
        return
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = getattr(metadata, "bw_donated_idxs", None)
    if metadata is not None and donated:
        metadata.bw_donated_idxs = _OfNoSubgraph(donated)


def is_backward(graph: fx.Graph) -> bool:
    """Whether a graph that Inductor compiles is the backward of a step."""
    return any("tangents" in str(n.target) for n in graph.find_nodes(op="placeholder"))


def probe() -> None:
    APIS.require()
    APIS.expect(TracingContext.try_get() is None, "a TracingContext is there outside of tracing")
    context = TracingContext(None)
    APIS.expect(hasattr(context, "fw_metadata"), "TracingContext has no fw_metadata")
