"""``Report``: one compiled graph's plan, as attributes, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
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

_SHOWN = 12


class Report:
    """What mstpass decided for one graph.

    Attributes:
        outcome: the plans themselves.
        cached: whether the graph came from a compile cache and the report from beside it.
    """

    def __init__(self, outcome: Outcome, cached: bool = False):
        self.outcome, self.cached = outcome, cached

    @property
    def regions(self) -> tuple[ChunkPlan, ...]:
        return self.outcome.regions

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        return self.outcome.rejections

    @property
    def saved(self) -> tuple[SavedValue, ...]:
        return self.outcome.save_plan.saved if self.outcome.save_plan else ()

    @property
    def saved_bytes(self) -> int:
        return sum(value.bytes for value in self.saved)

    @property
    def reconstructed(self) -> tuple[Reconstructed, ...]:
        """Values that do not cross, or in fewer bytes, since backward has them by other means."""
        return self.outcome.save_plan.reconstructed if self.outcome.save_plan else ()

    @property
    def peak_bytes(self) -> int | None:
        """Simulated peak of forward and backward.

        None where a size depends on data, and where an error left the graph to Inductor.
        """
        return self.outcome.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int | None:
        """Simulated peak of the step without loops; None where ``peak_bytes`` is."""
        return self.outcome.baseline_peak_bytes

    @property
    def extra_time(self) -> float | None:
        """Time beyond the step without loops, a fraction of it, by the cost model."""
        return self.outcome.extra_time

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self.outcome)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the report to ``path``; ``Report.from_json`` reads it back."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1, default=sorted)

    @staticmethod
    def from_json(path: str | os.PathLike[str], cached: bool = False) -> Report:
        with open(path, encoding="utf-8") as file:
            return Report(_outcome(json.load(file)), cached)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return (
            f"<mstpass.Report: {len(self.regions)} regions, {len(self.rejections)} rejections, "
            f"{_mib(self.saved_bytes)} saved for backward>"
        )


def _lines(report: Report) -> list[str]:
    lines = ["mstpass report" + (" (graph from the compile cache)" if report.cached else "")]
    if not report.regions:
        lines.append("  nothing was chunked: the graph compiles as Inductor would compile it")
    for region in report.regions[:_SHOWN]:
        lines.append(_region_line(region))
        if region.note:
            lines.append(f"           note: {region.note}")
    lines += _more(report.regions)
    if report.rejections:
        lines.append("  not taken:")
        lines += [f"    {rejection}" for rejection in report.rejections[:_SHOWN]]
        lines += _more(report.rejections)
    plan = report.outcome.save_plan
    if plan is not None:
        largest = ", ".join(f"{v.node} {_mib(v.bytes)}" for v in plan.saved[:3])
        lines.append(
            f"  saved for backward: {len(plan.saved)} values, {_mib(plan.saved_bytes)} "
            f"({plan.solver})" + (f"; largest: {largest}" if largest else "")
        )
    if report.reconstructed:
        won = sum(item.bytes for item in report.reconstructed)
        lines.append(f"  reconstructed, {_mib(won)} less:")
        lines += [f"    {item}" for item in report.reconstructed[:_SHOWN]]
        lines += _more(report.reconstructed)
    if report.peak_bytes is not None:
        lines.append(f"  simulated peak of forward and backward: {_mib(report.peak_bytes)}")
        if report.baseline_peak_bytes is not None and report.extra_time is not None:
            lines[-1] += (
                f"; without loops {_mib(report.baseline_peak_bytes)}; "
                f"estimated extra time {100 * report.extra_time:.1f} %"
            )
    lines += [f"  note: {note}" for note in report.outcome.notes]
    return lines


def _region_line(region: ChunkPlan) -> str:
    chunks = f"{region.num_chunks} chunks of {region.chunk_tokens} of {region.num_tokens} tokens"
    if region.symbolic:
        chunks = f"chunks of up to {region.chunk_tokens} tokens ({region.num_tokens} when traced)"
    return (
        f"  {region.kind:<8} {region.mode:<10} {chunks}, "
        f"{_mib(region.bytes_before)} -> {_mib(region.bytes_after)}  {region.source}"
    ).rstrip()


def _more(items: tuple[Any, ...]) -> list[str]:
    return [f"    ... and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _outcome(data: dict[str, Any]) -> Outcome:
    plan = data["save_plan"]
    return Outcome(
        regions=tuple(_chunk_plan(item) for item in data["regions"]),
        rejections=tuple(Rejection(**item) for item in data["rejections"]),
        save_plan=_save_plan(plan) if plan else None,
        peak_bytes=data["peak_bytes"],
        baseline_peak_bytes=data["baseline_peak_bytes"],
        extra_time=data["extra_time"],
        notes=tuple(data["notes"]),
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
