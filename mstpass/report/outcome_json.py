"""Reading an ``Outcome`` from a report's JSON; ``dataclasses.asdict`` writes it."""

from __future__ import annotations

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


def outcome_from(data: dict[str, Any]) -> Outcome:
    plan = data["save_plan"]
    return Outcome(
        regions=tuple(_chunk_plan(item) for item in data["regions"]),
        rejections=tuple(Rejection(**item) for item in data["rejections"]),
        save_plan=_save_plan(plan) if plan else None,
        peak_bytes=data["peak_bytes"],
        baseline_peak_bytes=data["baseline_peak_bytes"],
        extra_time=data["extra_time"],
        notes=tuple(data["notes"]),
        scheduled_peak_bytes=data.get("scheduled_peak_bytes"),
        limit_bytes=data.get("limit_bytes"),
    )


def _save_plan(data: dict[str, Any]) -> SavePlan:
    return SavePlan(
        tuple(SavedValue(**value) for value in data["saved"]),
        data["solver"],
        tuple(
            Reconstructed(
                **{**item, "sources": tuple(item["sources"]), "bounds": tuple(item["bounds"])}
            )
            for item in data["reconstructed"]
        ),
        tuple(data.get("nested", ())),
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
