"""The ops of functional collectives, by name; a torch without distributed has none.

They are the ops that DTensor and ``torch.distributed._functional_collectives`` put into a graph. A
collective returns a pending result, and ``wait_tensor`` the same memory, complete. torch has no
public names for these ops. Source: torch/csrc/distributed/c10d/Functional.cpp.
"""

from __future__ import annotations

import torch

from mstpass.torch_internals.op_types import OpOverload, schema_of
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=("torch.ops._c10d_functional", "torch.ops._dtensor"),
)
NAMESPACE = "_c10d_functional"
ALL_REDUCE = f"{NAMESPACE}::all_reduce"
ALL_TO_ALL_OF_DTENSOR = "_dtensor::shard_dim_alltoall"  # its result is complete
WAITS = frozenset({f"{NAMESPACE}::wait_tensor", f"{NAMESPACE}::wait_tensors"})
BETWEEN_TWO = frozenset({f"{NAMESPACE}::{op}" for op in ("isend", "irecv", "batch_p2p_ops")})


def overloads(names: tuple[str, ...]) -> list[OpOverload]:
    """The ops of these names, such as ``_c10d_functional::all_reduce``, that this torch has."""
    found = []
    for name in names:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            found.append(packet.default)
    return found


def probe() -> None:
    APIS.require()
    if not torch.distributed.is_available():
        return
    for name in (ALL_REDUCE, ALL_TO_ALL_OF_DTENSOR, f"{NAMESPACE}::wait_tensor"):
        ops = overloads((name,))
        APIS.expect([schema_of(op).name for op in ops] == [name], f"there is no op {name}")
    (all_reduce,) = overloads((ALL_REDUCE,))
    arguments = [argument.name for argument in schema_of(all_reduce).arguments]
    APIS.expect(arguments[:2] == ["input", "reduce_op"], "all_reduce has other arguments")
