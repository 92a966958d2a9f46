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

from mstpass.torch_internals.ddp_buckets import bucket_being_compiled
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.backends.distributed.propagate_dynamo_source",
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
    ),
)
DDP, FSDP2 = "DDP", "FSDP2"


@dataclasses.dataclass(frozen=True)
class Split:
    """How DDP's buckets have split a graph, seen from one part of it.

    Attributes:
        bucket_bytes: DDP's ``bucket_cap_mb``.
        part: the number of this part, from 1 in the order of the forward.
        parts: the number of parts.
        entering: the (fake) tensors that come from earlier parts.
    """

    bucket_bytes: int
    part: int
    parts: int
    entering: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """The wrapper around a graph: ``DDP`` or ``FSDP2``, or an empty name without one."""

    name: str = ""
    split: Split | None = None


def wrapper_of(gm: fx.GraphModule) -> Wrapper:
    """The wrapper around a graph that Dynamo is compiling."""
    if not torch.distributed.is_available():
        return Wrapper()
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        return Wrapper(DDP, _split(gm, ddp.bucket_bytes_cap))
    return Wrapper(FSDP2) if _is_sharded(gm) else Wrapper()


def _split(gm: fx.GraphModule, bucket_bytes: int) -> Split | None:
    """The split that the graph is a part of."""
    bucket = bucket_being_compiled()
    if bucket is None:
        return None
    call, _ = bucket
    calls = list(call.graph.find_nodes(op="call_module"))
    return Split(bucket_bytes, calls.index(call) + 1, len(calls), tuple(_entering(gm)))


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
