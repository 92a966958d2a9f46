"""A process group whose other ranks do not exist: exchanges are traced, and none takes place.

Source: torch/testing/_internal/distributed/fake_pg.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class NoPretendedRanks(RuntimeError):
    """This process has ranks already, or its torch knows none."""


@contextmanager
def pretended_ranks(size: int, rank: int) -> Iterator[None]:
    """In here this process is ``rank`` of ``size`` ranks.

    Raises:
        NoPretendedRanks: there can be none.
    """
    if not dist.is_available():
        raise NoPretendedRanks("this torch is built without torch.distributed")
    if dist.is_initialized():
        raise NoPretendedRanks("this process is a rank of a process group already")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
