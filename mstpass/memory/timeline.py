"""What a memory simulation finds: the buffers that are alive while each kernel of a step runs.

memory/simulate_ops.py makes a ``Timeline`` of each graph, and ``StepMemory`` joins both.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import NamedTuple

from mstpass.problem.op import Op

HELD = " (output)"  # ends the name of what the caller holds, where backward makes the like again


class Moment(NamedTuple):
    """While a kernel runs: ``bytes`` alive, its own included."""

    node: str
    bytes: int


class Buffer(NamedTuple):
    """Alive from moment ``start`` up to, not with, moment ``end``."""

    node: str
    bytes: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Of one graph.

    Attributes:
        alive: what is there at the peak, by name, the largest first.
        lives: of each buffer the number of its first moment, and of the one after its last; a
            moment is what runs as one (``fuse``).
        ops: by name.
    """

    moments: tuple[Moment, ...]
    alive: tuple[Moment, ...]
    lives: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict, repr=False)
    ops: Mapping[str, Op] = dataclasses.field(default_factory=dict, repr=False)

    def buffers(self) -> list[Buffer]:
        """At every moment their bytes, and the kernel's own ``inner_bytes``, are what is there."""
        return [Buffer(n, self.ops[n].bytes, *life) for n, life in self.lives.items()]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=operator.attrgetter("bytes"), default=Moment("", 0))


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Of a step's forward and backward, above what was allocated when the forward began."""

    forward: Timeline
    backward: Timeline
    known: bool = True  # False where a size depends on data, which counts as 1

    @property
    def peak_bytes(self) -> int:
        """Gradients included."""
        return max(self.forward.peak.bytes, self.backward.peak.bytes)

    @property
    def peak(self) -> Timeline:
        """The graph of the two that peaks."""
        return max(self.forward, self.backward, key=lambda timeline: timeline.peak.bytes)
