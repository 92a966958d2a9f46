"""A model of PyTorch's default caching allocator for CUDA; needs no device.

The allocator takes segments of memory from the device and divides them into blocks. A tensor gets
the smallest free block that is large enough; the rest of that block stays free, and free neighbours
merge. Free memory can therefore be useless, because no block of it is large enough. When the device
has no room for another segment, the allocator returns every segment that is entirely free and tries
again. Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp, without
``expandable_segments`` and ``max_split_size_mb``.

The memory that a training loop needs under an allocator that leaves gaps between tensors.

A step is given as its allocations and frees, in order. Several steps are replayed through the
caching allocator: the weights exist from the start, the optimizer's states from the first step of
the optimizer.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

_MIB = 1 << 20
_ROUND = 512  # the bytes of a tensor are rounded up to a multiple of it
_SMALL = 1 * _MIB  # tensors up to this size come from small segments
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT, _SEGMENT_ROUND = 10 * _MIB, 2 * _MIB  # larger tensors get their own segment


class OutOfMemory(Exception):
    """The device has no room for a tensor, though enough bytes may be free in pieces."""


class _Block:
    """A part of a segment; ``before`` and ``behind`` are its neighbours in the segment."""

    __slots__ = ("before", "behind", "free", "offset", "segment", "size", "small")

    def __init__(self, segment: int, offset: int, size: int, small: bool):
        self.segment, self.offset, self.size, self.small = segment, offset, size, small
        self.free = True
        self.before: _Block | None = None
        self.behind: _Block | None = None

    def __lt__(self, other: _Block) -> bool:
        """The best fit sorts first: the smallest block, then the oldest."""
        return (self.size, self.segment, self.offset) < (other.size, other.segment, other.offset)


class CachingAllocator:
    """The allocator of a device with ``capacity`` bytes for tensors."""

    def __init__(self, capacity: float):
        self.capacity = capacity
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._segments = 0
        self._free: dict[bool, list[_Block]] = {True: [], False: []}  # small ones, others; sorted
        self._blocks: dict[Hashable, _Block] = {}

    def allocate(self, key: Hashable, size: int) -> None:
        """Allocate a tensor of ``size`` bytes under the name ``key``.

        Raises:
            OutOfMemory: the device has no room for it.
        """
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        block = self._take_fitting(size) or self._new_segment(size)
        left = block.size - size
        if left >= _ROUND if block.small else left > _SMALL:
            self._split(block, size)
        block.free = False
        self._blocks[key] = block

    def free(self, key: Hashable) -> None:
        block = self._blocks.pop(key)
        block.free = True
        for other in (block.before, block.behind):
            if other is not None and other.free:
                self._remove_free(other)
                self._join(block, other)
        bisect.insort(self._free[block.small], block)

    def holds(self, key: Hashable) -> bool:
        return key in self._blocks

    def _take_fitting(self, size: int) -> _Block | None:
        small = size <= _SMALL
        blocks = self._free[small]
        i = bisect.bisect_left(blocks, _Block(-1, -1, size, small))
        return blocks.pop(i) if i < len(blocks) else None

    def _new_segment(self, size: int) -> _Block:
        small = size <= _SMALL
        if small or size < _OWN_SEGMENT:
            whole = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        else:
            whole = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        if self.reserved_bytes + whole > self.capacity:
            self._return_free_segments()
        if self.reserved_bytes + whole > self.capacity:
            raise OutOfMemory(f"no segment of {whole} bytes")
        self.reserved_bytes += whole
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._segments += 1
        return _Block(self._segments, 0, whole, small)

    def _return_free_segments(self) -> None:
        for small, blocks in self._free.items():
            parts = [b for b in blocks if b.before is not None or b.behind is not None]
            self.reserved_bytes -= sum(b.size for b in blocks) - sum(b.size for b in parts)
            self._free[small] = parts

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.segment, block.offset + size, block.size - size, block.small)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        bisect.insort(self._free[rest.small], rest)

    def _join(self, block: _Block, other: _Block) -> None:
        """Make a free neighbour part of the block."""
        if other is block.before:
            block.offset, block.before = other.offset, other.before
            if block.before is not None:
                block.before.behind = block
        else:
            block.behind = other.behind
            if block.behind is not None:
                block.behind.before = block
        block.size += other.size

    def _remove_free(self, block: _Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect.bisect_left(blocks, block)]


# ---- training loops ------------------------------------------------------------------------------
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
