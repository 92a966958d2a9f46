"""Exchanges between ranks that ``torch.compile`` traces.

Source: torch/distributed/_functional_collectives.py. Its collectives are pure functions, so that a
graph holds them as ops; those of ``torch.distributed`` write into a buffer of the caller. A group
is given by its name, which a graph holds as a constant.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if dist.is_available():
    from torch.distributed._functional_collectives import all_to_all_single_autograd


def all_to_all(x: Tensor, group_name: str) -> Tensor:
    """Send each equal part of the first dim to one rank of the group, in order, and get as many.

    Autograd sends the gradient the same way back.
    """
    return all_to_all_single_autograd(x.contiguous(), None, None, group_name)  # type: ignore[arg-type]


def begin_all_to_all(x: Tensor, size: int, group_name: str) -> Tensor:
    """The same without autograd; the result is complete once `wait` has returned it."""
    parts = [x.shape[0] // size] * size
    return _begin(x, parts, parts, group_name)


def _begin(x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    exchange = torch.ops._c10d_functional.all_to_all_single
    pending: Tensor = exchange(x.contiguous(), received, sent, group_name)
    return pending


def wait(pending: Tensor) -> Tensor:
    """What was begun, complete."""
    complete: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return complete


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of a mesh of several dims in one group, those of the last dim side by side."""
    return mesh._flatten().get_group()


def pass_on(x: Tensor, rank: int, size: int, group_name: str) -> Tensor:
    """Send ``x`` to the next of a group's ranks, and get as much from the one before. No autograd.

    Args:
        rank: which of the ``size`` ranks of the group this is.
    """
    rows = x.shape[0]
    sent = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    received = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    return wait(_begin(x, received, sent, group_name))
