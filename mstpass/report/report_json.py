"""The parts of a report as JSON data and back. docs/report-json.md lists every field.

The outcome is written by ``dataclasses.asdict`` and read by `outcome_from_json`. The details are
written as one list for each field of a node (columns), which is shorter and quicker to read than
one object for each node:

- ``modules`` and ``sources`` list each string once; nodes hold indices into these lists;
- ``inputs`` of a node are indices of nodes.
"""

from __future__ import annotations

import json
from typing import Any

from mstpass.plans import (
    ChunkPlan,
    LoopInput,
    LoopOutput,
    LoopPlan,
    Outcome,
    Reconstructed,
    Rejection,
    SavedValue,
    SavePlan,
)
from mstpass.report.details import Details, DrawnNode, Life, MemoryTimeline, ParetoPoint

_NODE_FIELDS = ("name", "op", "phase", "dtype", "bytes", "fate", "region")  # written as they are
_LIFE_FIELDS = ("node", "bytes", "start", "end", "transient")


def compact_json(value: Any) -> str:
    """JSON text without spaces; sets are written as sorted lists."""
    return json.dumps(value, separators=(",", ":"), default=sorted)


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


def details_from_json(data: dict[str, Any]) -> Details:
    """What `details_to_json` wrote."""
    columns = data["nodes"]
    names = columns["name"]
    rows = zip(
        *(columns[field] for field in _NODE_FIELDS),
        (data["modules"][i] for i in columns["module"]),
        (data["sources"][i] for i in columns["source"]),
        map(tuple, columns["shape"]),
        (tuple(names[i] for i in inputs) for inputs in columns["inputs"]),
        strict=True,
    )
    fields = (*_NODE_FIELDS, "module", "source", "shape", "inputs")
    return Details(
        nodes=tuple(DrawnNode(**dict(zip(fields, row, strict=True))) for row in rows),
        before=_timeline_from_json(data["before"]),
        after=_timeline_from_json(data["after"]),
        pareto=tuple(ParetoPoint(**point) for point in data["pareto"]),
    )


def _timeline_to_json(timeline: MemoryTimeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    lives: dict[str, list[Any]] = {
        field: [getattr(life, field) for life in timeline.lives] for field in _LIFE_FIELDS
    }
    lives["transient"] = [int(transient) for transient in lives["transient"]]
    return {
        "first_backward": timeline.first_backward,
        "moments": list(timeline.moments),
        "bytes": list(timeline.bytes),
        "lives": lives,
    }


def _timeline_from_json(data: dict[str, Any] | None) -> MemoryTimeline | None:
    if data is None:
        return None
    rows = zip(*(data["lives"][field] for field in _LIFE_FIELDS), strict=True)
    return MemoryTimeline(
        moments=tuple(data["moments"]),
        bytes=tuple(data["bytes"]),
        lives=tuple(
            Life(node, size, start, end, bool(transient))
            for node, size, start, end, transient in rows
        ),
        first_backward=data["first_backward"],
    )


# ---- outcome -----------------------------------------------------------------------------------
def outcome_from_json(data: dict[str, Any]) -> Outcome:
    """The outcome in a report's JSON; fields that older versions did not write get defaults."""
    save_plan = data["save_plan"]
    return Outcome(
        regions=tuple(_chunk_plan(item) for item in data["regions"]),
        rejections=tuple(Rejection(**item) for item in data["rejections"]),
        save_plan=_save_plan(save_plan) if save_plan else None,
        peak_bytes=data["peak_bytes"],
        baseline_peak_bytes=data["baseline_peak_bytes"],
        extra_time=data["extra_time"],
        notes=tuple(data["notes"]),
        scheduled_peak_bytes=data.get("scheduled_peak_bytes"),
        limit_bytes=data.get("limit_bytes"),
    )


def _save_plan(data: dict[str, Any]) -> SavePlan:
    reconstructed = tuple(
        Reconstructed(
            **{**item, "sources": tuple(item["sources"]), "bounds": tuple(item["bounds"])}
        )
        for item in data["reconstructed"]
    )
    return SavePlan(
        saved=tuple(SavedValue(**value) for value in data["saved"]),
        solver=data["solver"],
        reconstructed=reconstructed,
        nested=tuple(data.get("nested", ())),
    )


def _chunk_plan(data: dict[str, Any]) -> ChunkPlan:
    loops = tuple(
        LoopPlan(
            phase=loop["phase"],
            members=tuple(loop["members"]),
            inputs=tuple(LoopInput(i["node"], tuple(i["spec"])) for i in loop["inputs"]),
            outputs=tuple(
                LoopOutput(o["node"], _spec(o["spec"]), o["scaled"]) for o in loop["outputs"]
            ),
            unit=loop["unit"],
            prelude=tuple(loop["prelude"]),
        )
        for loop in data["loops"]
    )
    members = tuple((name, _spec(spec)) for name, spec in data["members"])
    return ChunkPlan(**{**data, "loops": loops, "members": members, "saved": tuple(data["saved"])})


def _spec(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
