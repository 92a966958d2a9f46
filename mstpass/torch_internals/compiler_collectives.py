"""Agree with the other ranks while compiling, where the user has promised that all compile at once.

That is the promise of ``torch._dynamo.config.enable_compiler_collectives``
(``TORCH_COMPILER_COLLECTIVES=1``), under which Dynamo itself talks to the other ranks for each
graph. Without it, a rank that compiles alone would wait for the others for ever. Source:
torch/_dynamo/distributed.py, torch/_dynamo/output_graph.py (``run_compiler_collective``).
"""

from __future__ import annotations

import torch.distributed as dist
from torch._dynamo.distributed import get_compile_pg
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.config.enable_compiler_collectives",
        "torch._dynamo.distributed.get_compile_pg",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.utils._mode_utils.no_dispatch",
    ),
    checked=("2.11", "2.13", "2.15"),
)


def least_of_ranks(number: int) -> int:
    """The least of the numbers that all ranks call this with; ``number`` if none can be asked."""
    group = get_compile_pg()
    if group is None:
        return number
    numbers = [number] * group.size()
    with no_dispatch(), unset_fake_temporarily():
        dist.all_gather_object(numbers, number, group=group)
    return min(numbers)


def probe() -> None:
    APIS.require()
    APIS.expect(get_compile_pg() is None or dist.is_initialized(), "a group without processes")
