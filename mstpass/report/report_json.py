"""The parts of a report as JSON data and back. docs/report-json.md lists every field.

The outcome is written by ``dataclasses.asdict`` and read by ``plain_data.decoded``. The details are
written as one list for each field of a node (columns), which is shorter and quicker to read than
one object for each node:

- ``modules`` and ``sources`` list each string once; nodes hold indices into these lists;
- ``inputs`` of a node are indices of nodes.
"""

from __future__ import annotations

import json
import types
from typing import Any

from mstpass.plain_data import decoded
from mstpass.report.details import Details, DrawnNode, Life, MemoryTimeline, ParetoPoint

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
