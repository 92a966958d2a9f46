"""What pictures of a plan are drawn from: plain data about one compiled graph, without the graph.

``Details`` has every node of the joint graph, as traced and before any loop, and the memory of the
step over time, under Inductor alone and as planned. JSON, HTML, drawings and traces are made from
it.
"""

from __future__ import annotations

import dataclasses

from mstpass.plans import Outcome

FORWARD, BACKWARD = "forward", "backward"
SAVED, RECOMPUTED, RECONSTRUCTED = "saved", "recomputed", "reconstructed"
FATES = ("", SAVED, RECOMPUTED, RECONSTRUCTED)


@dataclasses.dataclass(frozen=True)
class DrawnNode:
    """One node of the joint graph.

    Attributes:
        op: short name, such as ``"mm"``; ``"input"`` for placeholders.
        phase: ``"backward"`` for a node that needs a tangent, else ``"forward"``.
        module: path of the module that the node comes from, such as ``"model.layers.0.mlp"``. A
            backward node has the module of its forward node if the trace knows it. Empty if
            unknown.
        source: the user's line, such as ``"file.py:12"``; empty if unknown.
        shape: of the node's largest tensor; a symbolic size is given by its hint.
        bytes: of all the node's tensors.
        inputs: names of the nodes that this node reads.
        fate: how backward gets a forward value that it uses: ``"saved"``, ``"recomputed"`` or
            ``"reconstructed"``. Empty for other values, and for views, which hold no bytes. A
            gradient that a fused loop computes in the forward is ``"saved"``.
        region: index into the report's regions; -1 for a node outside of all regions.
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
    """A buffer's time in memory: from moment ``start`` up to, but not including, moment ``end``.

    Attributes:
        node: the node whose value the buffer holds. For a transient buffer, the op or the loop
            that uses it.
        transient: the buffer exists at one moment only, such as the memory of one chunk inside a
            loop, or the workspace of an attention kernel.
    """

    node: str
    bytes: int
    start: int
    end: int
    transient: bool = False


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """Simulated memory of one step: forward, then backward.

    Names are those of the joint graph's nodes, with two exceptions. Loops, and copies to the host
    and back, have a word in front (timeline_names.py). A value that the plan adds, such as a mask
    packed into bits, has a name of its own.

    Attributes:
        moments: the node that runs at each moment. Views, and nodes that are fused into others,
            have no moment.
        bytes: in use at each moment, beyond what was allocated when forward began. They are the
            sum over the lives that contain the moment.
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
        """The buffers in memory at a moment, the largest first."""
        alive = [life for life in self.lives if life.start <= moment < life.end]
        return tuple(sorted(alive, key=lambda life: -life.bytes))


@dataclasses.dataclass(frozen=True)
class ParetoPoint:
    """Another plan that the step could have; ``extra_time`` is as in ``Report.extra_time``."""

    label: str  # such as "memory_budget=0.3"
    peak_bytes: int
    extra_time: float
    chosen: bool = False


@dataclasses.dataclass(frozen=True)
class Details:
    """Everything that a picture shows besides the plan itself.

    Attributes:
        before: the step under Inductor alone, as torch's partitioner splits it. None if a size
            depends on data, or if torch's partitioner splits the planned step as well.
        after: the step as planned; None if a size depends on data.
        pareto: plans of the same step at other budgets; empty unless they were asked for.
    """

    nodes: tuple[DrawnNode, ...]
    before: MemoryTimeline | None = None
    after: MemoryTimeline | None = None
    pareto: tuple[ParetoPoint, ...] = ()

    def timelines(self) -> list[tuple[str, MemoryTimeline]]:
        """The timelines that are known, each with its title: as planned, then Inductor's."""
        titled = [("mst: the step as planned", self.after), ("Inductor alone", self.before)]
        return [(title, timeline) for title, timeline in titled if timeline is not None]


def fused_nodes(outcome: Outcome) -> frozenset[str]:
    """Nodes that run in the forward as parts of fused loops, or before them in their preludes.

    Nodes of the backward are among them: a fused loop computes gradients in the forward.
    """
    loops = [loop for region in outcome.regions for loop in region.loops if loop.unit]
    return frozenset(name for loop in loops for name in (*loop.members, *loop.prelude))
