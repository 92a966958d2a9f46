"""What pictures of a plan are drawn from: plain data about one compiled graph, without the graph.

``Details`` has every node of the joint graph, as traced and before any loop, and the memory of the
step over time, under Inductor alone and as planned. JSON, HTML, drawings and traces are made from
it.

Names in a memory timeline that are more than the name of a node.

==================  ============================================================================
``loop:v``          a loop over chunks whose first result is ``v``
``offload:v``       the copy of ``v`` to the host begins
``offloaded:v``     ``v`` is on the host: its memory on the device is freed
``reload:v``        the copy of ``v`` back to the device begins; the buffer that it is copied into
==================  ============================================================================

The parts of a report as JSON data and back. docs/report-json.md lists every field.

The outcome is written by ``dataclasses.asdict`` and read by ``plain_data.decoded``. The details are
written as one list for each field of a node (columns), which is shorter and quicker to read than
one object for each node:

- ``modules`` and ``sources`` list each string once; nodes hold indices into these lists;
- ``inputs`` of a node are indices of nodes.
"""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

from mstpass.plain_data import decoded
from mstpass.plans import Outcome

LOOP, OFFLOAD, OFFLOADED, RELOAD = "loop:", "offload:", "offloaded:", "reload:"
_PREFIXES = (LOOP, OFFLOAD, OFFLOADED, RELOAD)


def node_name(name: str) -> str:
    """The node of the joint graph that a name in a timeline belongs to."""
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)


def is_loop(name: str) -> bool:
    """Whether the name stands for a loop."""
    return name.startswith(LOOP)


def is_on_host(name: str) -> bool:
    """Whether the name stands for a value in host memory, which takes none on the device."""
    return name.startswith((OFFLOAD, OFFLOADED))


# ---- details -------------------------------------------------------------------------------------
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
    and back, have a word in front. A value that the plan adds, such as a mask
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


# ---- report json ---------------------------------------------------------------------------------
_NODE_FIELDS = ("name", "op", "phase", "dtype", "bytes", "fate", "region")  # written as they are
_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(_NODE_FIELDS, str),
    **dict.fromkeys(("bytes", "region", "module", "source"), int),
    **dict.fromkeys(("shape", "inputs"), tuple[int, ...]),
}
_LIFE_COLUMNS: dict[str, Any] = {
    "node": str,
    **dict.fromkeys(("bytes", "start", "end", "transient"), int),
}


def compact_json(value: Any) -> str:
    """JSON text without spaces; sets are written as sorted lists."""
    return json.dumps(value, separators=(",", ":"), default=sorted)


def _list_of(kind: Any) -> Any:
    return types.GenericAlias(tuple, (kind, ...))


# ---- details -----------------------------------------------------------------------------------
def details_to_json(details: Details) -> dict[str, Any]:
    """The details as lists, numbers and strings."""
    modules: dict[str, int] = {}
    sources: dict[str, int] = {}
    index = {node.name: i for i, node in enumerate(details.nodes)}
    nodes: dict[str, list[Any]] = {
        field: [getattr(node, field) for node in details.nodes] for field in _NODE_FIELDS
    }
    nodes["module"] = [modules.setdefault(node.module, len(modules)) for node in details.nodes]
    nodes["source"] = [sources.setdefault(node.source, len(sources)) for node in details.nodes]
    nodes["shape"] = [list(node.shape) for node in details.nodes]
    nodes["inputs"] = [[index[name] for name in node.inputs] for node in details.nodes]
    return {
        "modules": list(modules),
        "sources": list(sources),
        "nodes": nodes,
        "before": _timeline_to_json(details.before),
        "after": _timeline_to_json(details.after),
        "pareto": [vars(point) for point in details.pareto],
    }


def details_from_json(data: Any) -> Details:
    """What `details_to_json` wrote.

    Raises:
        TypeError, ValueError, LookupError: the data is something else.
    """
    given = data["nodes"]
    columns = {name: decoded(_list_of(kind), given[name]) for name, kind in _COLUMNS.items()}
    modules, sources = (decoded(tuple[str, ...], data[name]) for name in ("modules", "sources"))
    names = columns["name"]
    columns["module"] = tuple(modules[i] for i in columns["module"])
    columns["source"] = tuple(sources[i] for i in columns["source"])
    columns["inputs"] = tuple(tuple(names[i] for i in inputs) for inputs in columns["inputs"])
    rows = zip(*columns.values(), strict=True)
    return Details(
        nodes=tuple(DrawnNode(**dict(zip(columns, row, strict=True))) for row in rows),
        before=_timeline_from_json(data["before"]),
        after=_timeline_from_json(data["after"]),
        pareto=decoded(tuple[ParetoPoint, ...], data["pareto"], newer=True),
    )


def _timeline_to_json(timeline: MemoryTimeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    lives: dict[str, list[Any]] = {
        field: [getattr(life, field) for life in timeline.lives] for field in _LIFE_COLUMNS
    }
    lives["transient"] = [int(transient) for transient in lives["transient"]]
    return {
        "first_backward": timeline.first_backward,
        "moments": list(timeline.moments),
        "bytes": list(timeline.bytes),
        "lives": lives,
    }


def _timeline_from_json(data: Any) -> MemoryTimeline | None:
    if data is None:
        return None
    columns = [decoded(_list_of(kind), data["lives"][f]) for f, kind in _LIFE_COLUMNS.items()]
    return MemoryTimeline(
        moments=decoded(tuple[str, ...], data["moments"]),
        bytes=decoded(tuple[int, ...], data["bytes"]),
        lives=tuple(
            Life(node, size, start, end, bool(transient))
            for node, size, start, end, transient in zip(*columns, strict=True)
        ),
        first_backward=decoded(int, data["first_backward"]),
    )
