"""The memory that a training loop needs under an allocator that leaves gaps between tensors.

A step is given as its allocations and frees, in order. Several steps are replayed through the
caching allocator: the weights exist from the start, the optimizer's states from the first step of
the optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mstpass.planner.caching_allocator import CachingAllocator, OutOfMemory

_STEPS = 3  # the first has no optimizer states yet; the others meet the gaps of the one before
_TOLERANCE = 0.002  # of the needed bytes


class Event(NamedTuple):
    """A tensor of ``bytes`` is allocated; with None for ``bytes`` it is freed."""

    key: Hashable
    bytes: int | None


class OptimizerStep(NamedTuple):
    """The optimizer updates one parameter during the backward."""

    parameter: int


Events = Sequence[Event | OptimizerStep]


@dataclasses.dataclass(frozen=True)
class Resident:
    """Bytes that a device holds besides the tensors of a step.

    Attributes:
        weights: those of each parameter.
        states: those of each parameter that is trained.
        temporaries: for each of these, what the optimizer allocates while it updates it.
        gathered: bytes that are held all the time.
    """

    weights: tuple[int, ...]
    states: tuple[int, ...]
    temporaries: tuple[int, ...]
    gathered: int = 0


def needed_bytes(events: Events, resident: Resident, room_bytes: int) -> int:
    """The smallest capacity on which the training loop runs, to within 0.2 per cent.

    The result is at most ``room_bytes`` if and only if the loop runs with that capacity.
    """
    too_small, enough = 0.0, float(_reserved(events, resident, float("inf")) or 0)
    if enough <= room_bytes:
        room_bytes = int(enough)
    elif _reserved(events, resident, room_bytes) is not None:
        enough = room_bytes
    else:
        too_small = room_bytes
    too_small = max(too_small, sum(resident.weights) + sum(resident.states))
    while enough - too_small > _TOLERANCE * enough:
        middle = (too_small + enough) / 2
        if _reserved(events, resident, middle) is not None:
            enough = middle
        else:
            too_small = middle
    return int(enough)


def _reserved(events: Events, resident: Resident, capacity: float) -> int | None:
    """Bytes that the allocator reserves at most; None where ``capacity`` bytes do not suffice."""
    allocator = CachingAllocator(capacity)
    try:
        for i, size in enumerate(resident.weights):
            _allocate_once(allocator, ("weight", i), size)
        _allocate_once(allocator, "gathered", resident.gathered)
        for _ in range(_STEPS):
            _replay_step(allocator, events, resident)
    except OutOfMemory:
        return None
    return allocator.peak_reserved_bytes


def _replay_step(allocator: CachingAllocator, events: Events, resident: Resident) -> None:
    alive: dict[Hashable, None] = {}
    updated: set[int] = set()
    for event in events:
        if isinstance(event, OptimizerStep):
            updated.add(event.parameter)
            _update(allocator, resident, [event.parameter])
        elif event.bytes is None:
            allocator.free(("step", event.key))
            del alive[event.key]
        else:
            allocator.allocate(("step", event.key), event.bytes)
            alive[event.key] = None
    _update(allocator, resident, [i for i in range(len(resident.states)) if i not in updated])
    for key in alive:  # gradients, and tensors that the loop holds until its next step
        allocator.free(("step", key))


def _update(allocator: CachingAllocator, resident: Resident, parameters: Sequence[int]) -> None:
    """The optimizer updates some parameters, and makes their states where there are none yet."""
    for i in parameters:
        _allocate_once(allocator, ("state", i), resident.states[i])
    with_temporaries = [i for i in parameters if resident.temporaries[i]]
    for i in with_temporaries:
        allocator.allocate(("temporary", i), resident.temporaries[i])
    for i in with_temporaries:
        allocator.free(("temporary", i))


def _allocate_once(allocator: CachingAllocator, key: Hashable, size: int) -> None:
    if size and not allocator.holds(key):
        allocator.allocate(key, size)
