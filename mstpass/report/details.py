"""What a picture of a plan is drawn from: plain data, with no FX graph behind it.

``Details`` belongs to one compiled graph. It names every node of the joint graph, as traced and
before any loop, and gives the memory of the step over time, without loops and as planned.
"""

from __future__ import annotations

import dataclasses

FORWARD, BACKWARD = "forward", "backward"
SAVED, RECOMPUTED, RECONSTRUCTED = "saved", "recomputed", "reconstructed"
FATES = ("", SAVED, RECOMPUTED, RECONSTRUCTED)


@dataclasses.dataclass(frozen=True)
class DrawnNode:
    """One node of the joint graph.

    Attributes:
        op: short name, such as ``"mm"``; ``"input"`` for placeholders.
        phase: ``"forward"``, or ``"backward"`` where it needs a tangent.
        module: path of the module that it comes from, such as ``"model.layers.0.mlp"``; a backward
            node has that of its forward node where the trace knows it. Empty where unknown.
        source: ``"file.py:12"`` of the user's line; empty where unknown.
        shape: of its largest tensor; symbolic sizes by their hint.
        bytes: of all its tensors.
        inputs: names of nodes.
        fate: of a forward value that backward uses: ``"saved"``, ``"recomputed"`` or
            ``"reconstructed"``; else empty, as it is for views, which hold no bytes. A gradient
            that a fused loop computes in the forward is ``"saved"``.
        region: index into the report's regions; -1 for none.
    """

    name: str
    op: str
    phase: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    inputs: tuple[str, ...]
    fate: str = ""
    region: int = -1


@dataclasses.dataclass(frozen=True)
class Life:
    """A buffer's time in memory: from moment ``start`` up to, not with, moment ``end``.

    Attributes:
        node: the node whose value it holds, or the loop whose chunk it is (``transient``).
        transient: memory of one moment, such as a loop's chunk or an attention's workspace.
    """

    node: str
    bytes: int
    start: int
    end: int
    transient: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """Simulated memory of one step: forward, then backward.

    Names are those of the joint graph's nodes, but for a loop's, ``"loop:"`` and the first node
    that it returns, and for what a plan adds, such as a mask packed into bits.

    Attributes:
        moments: the node that runs at each moment; views, and what is fused into others, have none.
        bytes: in use at each moment, above what was allocated when forward began. At every moment
            the sum over the lives that contain it.
        first_backward: index of backward's first moment.
    """

    moments: tuple[str, ...]
    bytes: tuple[int, ...]
    lives: tuple[Life, ...]
    first_backward: int

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes, default=0)

    def alive_at(self, moment: int) -> tuple[Life, ...]:
        """Largest first."""
        alive = [life for life in self.lives if life.start <= moment < life.end]
        return tuple(sorted(alive, key=lambda life: -life.bytes))


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """One plan that the step could have: ``extra_time`` as ``Report.extra_time``."""

    label: str  # such as "memory_budget=0.3"
    peak_bytes: int
    extra_time: float
    chosen: bool = False


@dataclasses.dataclass(frozen=True)
class Details:
    """Everything that a picture shows beyond the plan itself.

    Attributes:
        before: the step without loops, as torch's partitioner would cut it; None where a size
            depends on data, and where torch's partitioner cuts the step anyway.
        after: the step as planned; None where a size depends on data.
        pareto: plans of the same step at other budgets; empty unless asked for.
    """

    nodes: tuple[DrawnNode, ...]
    before: MemoryTimeline | None = None
    after: MemoryTimeline | None = None
    pareto: tuple[ParetoPoint, ...] = ()
