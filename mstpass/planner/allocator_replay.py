"""What a training loop needs of a device whose allocator leaves gaps between tensors.

A step is the order in which it allocates and frees; it is played several times, with the weights
there from the beginning and the optimizer's states from its first step on, through the allocator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mstpass.planner.caching_allocator import CachingAllocator, OutOfMemory

_STEPS = 3  # the first without states; then what one step leaves behind, the next one meets
_TOLERANCE = 0.002  # of what is needed


class Event(NamedTuple):
    """A tensor gets room; with None for ``bytes`` it is freed."""

    key: Hashable
    bytes: int | None


class Stepped(NamedTuple):
    """The optimizer's step of one parameter, in the backward."""

    parameter: int


Events = Sequence[Event | Stepped]


@dataclasses.dataclass(frozen=True)
class Resident:
    """What a device holds besides a step's tensors, in bytes.

    Attributes:
        weights, states: for each parameter.
        temporaries: what the optimizer's step of each parameter needs while it runs.
        gathered: held all the time.
    """

    weights: tuple[int, ...]
    states: tuple[int, ...]
    temporaries: tuple[int, ...]
    gathered: int = 0


def needed_bytes(events: Events, resident: Resident, room_bytes: int) -> int:
    """The least capacity on which the loop runs, to within a fifth of a per cent.

    At most ``room_bytes`` if, and only if, it runs with these.
    """
    least, most = 0.0, float(_reserved(events, resident, float("inf")) or 0)
    if most <= room_bytes:
        room_bytes = int(most)
    elif _runs(events, resident, room_bytes):
        most = room_bytes
    else:
        least = room_bytes
    least = max(least, sum(resident.weights) + sum(resident.states))
    while most - least > _TOLERANCE * most:
        middle = (least + most) / 2
        if _runs(events, resident, middle):
            most = middle
        else:
            least = middle
    return int(most)


def _runs(events: Events, resident: Resident, capacity: float) -> bool:
    """Whether the loop runs on a device with that many bytes for tensors."""
    return _reserved(events, resident, capacity) is not None


def _reserved(events: Events, resident: Resident, capacity: float) -> int | None:
    """The most that the allocator holds of the device; None where it runs out of it."""
    allocator = CachingAllocator(capacity)
    try:
        for i, size in enumerate(resident.weights):
            _held(allocator, ("weight", i), size)
        _held(allocator, "gathered", resident.gathered)
        for _ in range(_STEPS):
            _step(allocator, events, resident)
    except OutOfMemory:
        return None
    return allocator.peak_reserved_bytes


def _step(allocator: CachingAllocator, events: Events, resident: Resident) -> None:
    alive: dict[Hashable, None] = {}
    used: set[int] = set()
    for event in events:
        if isinstance(event, Stepped):
            used.add(event.parameter)
            _optimize(allocator, resident, [event.parameter])
        elif event.bytes is None:
            allocator.free(("step", event.key))
            del alive[event.key]
        else:
            allocator.allocate(("step", event.key), event.bytes)
            alive[event.key] = None
    _optimize(allocator, resident, [i for i in range(len(resident.states)) if i not in used])
    for key in alive:  # gradients, and what the loop holds until its next step
        allocator.free(("step", key))


def _optimize(allocator: CachingAllocator, resident: Resident, which: Sequence[int]) -> None:
    for i in which:
        _held(allocator, ("state", i), resident.states[i])
    there = [i for i in which if resident.temporaries[i]]
    for i in there:
        allocator.allocate(("temporary", i), resident.temporaries[i])
    for i in there:
        allocator.free(("temporary", i))


def _held(allocator: CachingAllocator, key: Hashable, size: int) -> None:
    if size and not allocator.holds(key):
        allocator.allocate(key, size)
