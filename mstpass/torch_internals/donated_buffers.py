"""Keep Inductor from overwriting a loop's operands as if they were donated to the backward.

A *donated* buffer is a saved value that backward may overwrite; torch lists them by the position
of backward's inputs. Up to torch 2.14 Inductor applies the same positions to the inputs of every
subgraph in the backward, a loop's body among them, and may overwrite a weight there
(pytorch #153679, #192840; source: ``GraphLowering.placeholder`` in torch/_inductor/graph.py).

Only positions beyond the inputs of the largest subgraph are safe. partition/split.py puts the
gradients that fused loops computed last: these, the largest, stay donated and are scaled in place.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._guards import TracingContext

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._guards.TracingContext.try_get",
        "torch._functorch._aot_autograd.schemas.ViewAndMutationMeta.bw_donated_idxs",
    ),
)


def keep_safe_donations(graph: fx.Graph) -> None:
    """Drop unsafe positions from the backward's donations, in place and for torch's own check."""
    if not is_backward(graph):
        return
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = getattr(metadata, "bw_donated_idxs", None)
    if not donated or torch.__version__ >= "2.15":
        return
    largest = max(map(_num_inputs, _subgraphs(graph)), default=0)
    donated[:] = [position for position in donated if position >= largest]


def is_backward(graph: fx.Graph) -> bool:
    """Whether a graph that Inductor compiles is the backward of a step."""
    return any("tangents" in str(n.target) for n in graph.find_nodes(op="placeholder"))


def _subgraphs(graph: fx.Graph) -> list[fx.GraphModule]:
    root = graph.owning_module
    named = [getattr(root, str(n.target), None) for n in graph.find_nodes(op="get_attr")]
    return [m for top in named if isinstance(top, fx.GraphModule) for m in _nested(top)]


def _nested(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [m for m in module.modules() if isinstance(m, fx.GraphModule)]


def _num_inputs(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="placeholder"))


def probe() -> None:
    APIS.require()
    APIS.expect(TracingContext.try_get() is None, "a TracingContext is there outside of tracing")
    context = TracingContext(None)
    APIS.expect(hasattr(context, "fw_metadata"), "TracingContext has no fw_metadata")
