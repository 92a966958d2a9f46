"""What a memory simulation finds: the buffers that are alive while each kernel of a step runs.

A *moment* is the run of one kernel, or of several that Inductor fuses into one.
memory/simulate_ops.py makes a ``Timeline`` of a graph; ``StepMemory`` joins forward and backward.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import NamedTuple

from mstpass.problem.op import Op

# Ends the name of a buffer that the caller holds, if backward computes a value of the same name.
HELD = " (output)"


class Moment(NamedTuple):
    """One kernel: the bytes that are alive while it runs, its results and workspace included."""

    node: str
    bytes: int


class Buffer(NamedTuple):
    """A buffer that is alive from moment ``start`` up to, but not including, moment ``end``."""

    node: str
    bytes: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The memory of one graph over its kernels.

    Attributes:
        moments: one for each kernel, in the order in which they run.
        alive: name and bytes of each buffer that is alive at the peak, the largest first.
        lives: of each buffer the number of its first moment, and of the first one without it.
            Kernels that run as one, or in one function, have the same buffers in all their moments.
        ops: all ops by name.
    """

    moments: tuple[Moment, ...]
    alive: tuple[Moment, ...]
    lives: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict, repr=False)
    ops: Mapping[str, Op] = dataclasses.field(default_factory=dict, repr=False)

    def buffers(self) -> list[Buffer]:
        """All buffers. A moment's bytes are those alive then, and the kernel's ``inner_bytes``."""
        return [Buffer(n, self.ops[n].bytes, *life) for n, life in self.lives.items()]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=operator.attrgetter("bytes"), default=Moment("", 0))


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory of a step, above what was allocated when its forward began.

    Attributes:
        known: False if a size depends on data; such a size counts as 1.
    """

    forward: Timeline
    backward: Timeline
    known: bool = True

    @property
    def peak_bytes(self) -> int:
        """The higher of both peaks. Gradients are part of the backward."""
        return max(self.forward.peak.bytes, self.backward.peak.bytes)

    @property
    def peak(self) -> Timeline:
        """The timeline with the higher peak."""
        return max(self.forward, self.backward, key=lambda timeline: timeline.peak.bytes)
