"""Exchanges between ranks that ``torch.compile`` traces and autograd can go back through.

Source: torch/distributed/_functional_collectives.py. Its collectives are pure functions, so that a
graph holds them as ops; those of ``torch.distributed`` write into a buffer of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

if torch.distributed.is_available():
    from torch.distributed._functional_collectives import all_to_all_single_autograd


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send each equal part of the first dim to one rank of the group, in order, and get as many.

    The gradient goes the same way back.
    """
    return all_to_all_single_autograd(x.contiguous(), None, None, group)


def pass_on(
    x: Tensor, to: int, source: int, size: int, group: dist.ProcessGroup | Sequence[int]
) -> Tensor:
    """Send all of ``x`` to one rank of a group of ``size`` ranks, and get as much from another one.

    All ranks call this together, each the source of the one that it sends to.
    """
    rows = x.shape[0]
    sent = [rows if rank == to else 0 for rank in range(size)]
    received = [rows if rank == source else 0 for rank in range(size)]
    return all_to_all_single_autograd(x.contiguous(), received, sent, group)  # type: ignore[arg-type]
