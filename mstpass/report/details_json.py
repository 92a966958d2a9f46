"""``Details`` as JSON data and back: a column for each field, which is short and quick to read.

``modules`` and ``sources`` list each string once, and nodes have its index; ``inputs`` are indices
of nodes. docs/explain.md has every field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mstpass.report.details import Details, DrawnNode, Life, MemoryTimeline, ParetoPoint

_PLAIN = ("name", "op", "phase", "dtype", "bytes", "fate", "region")


def to_columns(details: Details) -> dict[str, Any]:
    modules, sources = _Strings(), _Strings()
    index = {node.name: i for i, node in enumerate(details.nodes)}
    nodes: dict[str, list[Any]] = {
        name: [getattr(node, name) for node in details.nodes] for name in _PLAIN
    }
    nodes["module"] = [modules.index(node.module) for node in details.nodes]
    nodes["source"] = [sources.index(node.source) for node in details.nodes]
    nodes["shape"] = [list(node.shape) for node in details.nodes]
    nodes["inputs"] = [[index[name] for name in node.inputs] for node in details.nodes]
    return {
        "modules": list(modules.known),
        "sources": list(sources.known),
        "nodes": nodes,
        "before": _timeline_columns(details.before),
        "after": _timeline_columns(details.after),
        "pareto": [vars(point) for point in details.pareto],
    }


def from_columns(data: dict[str, Any]) -> Details:
    nodes = data["nodes"]
    names = nodes["name"]
    rows = zip(
        *(nodes[name] for name in _PLAIN),
        (data["modules"][i] for i in nodes["module"]),
        (data["sources"][i] for i in nodes["source"]),
        map(tuple, nodes["shape"]),
        (tuple(names[i] for i in inputs) for inputs in nodes["inputs"]),
        strict=True,
    )
    keys = (*_PLAIN, "module", "source", "shape", "inputs")
    return Details(
        nodes=tuple(DrawnNode(**dict(zip(keys, row, strict=True))) for row in rows),
        before=_timeline(data["before"]),
        after=_timeline(data["after"]),
        pareto=tuple(ParetoPoint(**point) for point in data["pareto"]),
    )


class _Strings:
    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def index(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


def _timeline_columns(timeline: MemoryTimeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    lives = timeline.lives
    return {
        "first_backward": timeline.first_backward,
        "moments": list(timeline.moments),
        "bytes": list(timeline.bytes),
        "lives": {
            "node": [life.node for life in lives],
            "bytes": [life.bytes for life in lives],
            "start": [life.start for life in lives],
            "end": [life.end for life in lives],
            "transient": [int(life.transient) for life in lives],
        },
    }


def _timeline(data: dict[str, Any] | None) -> MemoryTimeline | None:
    if data is None:
        return None
    columns = (data["lives"][name] for name in ("node", "bytes", "start", "end", "transient"))
    lives: Iterable[Life] = (
        Life(node, size, start, end, bool(transient))
        for node, size, start, end, transient in zip(*columns, strict=True)
    )
    return MemoryTimeline(
        tuple(data["moments"]), tuple(data["bytes"]), tuple(lives), data["first_backward"]
    )
