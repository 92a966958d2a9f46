"""The ranks that share a sequence: rank i of R holds the i-th of R equal parts."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = DeviceMesh | dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process group, seen from one of its ranks.

    Attributes:
        size: how many ranks there are.
        rank: which one this process is, from 0.
    """

    group: dist.ProcessGroup
    size: int
    rank: int

    @property
    def name(self) -> str:
        """The name by which torch finds the group."""
        return str(self.group.group_name)

    @property
    def members(self) -> list[int]:
        """The global ranks, in the order of the group."""
        return dist.get_process_group_ranks(self.group)


def ranks_of(mesh_or_group: Group) -> Ranks:
    """The ranks of a one-dimensional device mesh or of a process group; all ranks for None.

    Raises:
        ValueError: there are no process groups yet, or this process is not in this one; or the mesh
            has several dims.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "a sequence is shared by the ranks of a process group, and there is none: call "
            "torch.distributed.init_process_group first"
        )
    group = mesh_or_group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a sequence is shared along one dim of a mesh, and this one has {group.ndim} "
                f"({group.mesh_dim_names}): give one of them, such as mesh['sequence']"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    assert group is not None
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not one of {dist.get_process_group_ranks(group)}, which "
            "share the sequence: give each rank the group that it is in"
        )
    return Ranks(group, dist.get_world_size(group), rank)


def sum_over(value: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of a value over the ranks. Not traced: for numbers of a batch."""
    total = value.clone()
    dist.all_reduce(total, group=ranks.group)
    return total
