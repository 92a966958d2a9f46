"""The ranks that share a sequence: rank i of R holds the i-th of R equal parts.

On a mesh of two dims ``(P, U)``, each row of U ranks exchanges heads, and the P rows are a ring.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mstpass.torch_internals.collectives import group_of_all

Group = DeviceMesh | dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A process group, seen from one of its ranks.

    Attributes:
        size: how many ranks there are.
        rank: which one this process is, from 0.
        ring, row: of a mesh of two dims, this rank's column and its row; else None.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    ring: Ranks | None = None
    row: Ranks | None = None

    @property
    def name(self) -> str:
        """The name by which torch finds the group."""
        return str(self.group.group_name)

    @property
    def members(self) -> list[int]:
        """The global ranks, in the order of the group."""
        return dist.get_process_group_ranks(self.group)


def ranks_of(mesh_or_group: Group) -> Ranks:
    """The ranks of a device mesh of one or two dims, or of a process group; all ranks for None.

    Raises:
        ValueError: there are no process groups yet, or this process is not in this one; or the mesh
            has more than two dims; or it is neither.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "a sequence is shared by the ranks of a process group, and there is none: call "
            "torch.distributed.init_process_group first"
        )
    group = mesh_or_group
    if isinstance(group, DeviceMesh):
        if group.ndim == 2:
            return _of_two_dims(group)
        if group.ndim != 1:
            raise ValueError(
                f"a sequence is shared along one dim of a mesh, or along two, a ring of rows that "
                f"exchange heads; this one has {group.ndim} ({group.mesh_dim_names}): give one or "
                "two of them, such as mesh['sequence']"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "the ranks that share a sequence are a process group, a device mesh, or None for all "
            f"ranks, not {group!r}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not one of {dist.get_process_group_ranks(group)}, which "
            "share the sequence: give each rank the group that it is in"
        )
    return Ranks(group, dist.get_world_size(group), rank)


def _of_two_dims(mesh: DeviceMesh) -> Ranks:
    if not mesh.mesh_dim_names:
        raise ValueError(
            "the dims of a mesh whose ranks share a sequence need names: init_device_mesh(..., "
            "mesh_dim_names=('ring', 'heads'))"
        )
    ring, row = (ranks_of(mesh.get_group(dim)) for dim in (0, 1))
    return dataclasses.replace(ranks_of(group_of_all(mesh)), ring=ring, row=row)


def sum_over(value: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of a value over the ranks. Not traced: for numbers of a batch."""
    total = value.clone()
    dist.all_reduce(total, group=ranks.group)
    return total
