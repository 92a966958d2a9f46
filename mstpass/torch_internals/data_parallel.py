"""Which data-parallel wrapper runs the graph that is compiled now, and what DDP's buckets cut off.

DDP's forward and FSDP2's hooks are not compiled: each ends a graph. Besides, Dynamo splits the
graph of a module inside DDP where one bucket of gradients is full, so that DDP can reduce the
bucket's gradients while the backward of the earlier layers runs. Each part is compiled by itself.
A part's inputs are parameters and inputs of the whole graph, which have a Dynamo source, and values
of earlier parts, which have none.

Source: torch/_dynamo/backends/distributed.py, torch/_dynamo/convert_frame.py,
torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.backends.distributed.propagate_dynamo_source",
        "torch._dynamo.backends.distributed.SubmodCompiler.compile_submod",
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
    ),
    checked=("2.11", "2.13", "2.15"),
)
DDP, FSDP2 = "DDP", "FSDP2"
_SPLIT = "DDPOptimizer"  # in the reason that Dynamo gives for the end of a part


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """The wrapper around a graph.

    Attributes:
        name: ``DDP`` or ``FSDP2``; empty without one.
        bucket_bytes: DDP's ``bucket_cap_mb``, if its buckets split the graph; else 0.
        entering: the (fake) tensors that come from earlier parts of a split graph.
    """

    name: str = ""
    bucket_bytes: int = 0
    entering: tuple[torch.Tensor, ...] = ()


def wrapper_of(gm: fx.GraphModule) -> Wrapper:
    """The wrapper around a graph that Dynamo has captured."""
    if not torch.distributed.is_available():
        return Wrapper()
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        if not _is_part(gm):
            return Wrapper(DDP)
        return Wrapper(DDP, ddp.bucket_bytes_cap, tuple(_entering(gm)))
    return Wrapper(FSDP2) if _is_sharded(gm) else Wrapper()


def _is_part(gm: fx.GraphModule) -> bool:
    reason = getattr(gm, "compile_subgraph_reason", None)
    return _SPLIT in str(getattr(reason, "reason", ""))


def _entering(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """The tensors that earlier parts made."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if getattr(node, "_dynamo_source", None) is None and isinstance(value, torch.Tensor):
            yield value


def _is_sharded(gm: fx.GraphModule) -> bool:
    """Whether a node is from a module that FSDP2 wraps."""
    from torch.distributed.fsdp import FSDPModule

    stacks = (node.meta.get("nn_module_stack") or {} for node in gm.graph.nodes)
    classes = {entry[1] for stack in stacks for entry in stack.values()}
    return any(isinstance(cls, type) and issubclass(cls, FSDPModule) for cls in classes)


def probe() -> None:
    if torch.distributed.is_available():
        APIS.require()
        APIS.expect(wrapper_of(_empty()) == Wrapper(), "a wrapper around no module")


def _empty() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)
