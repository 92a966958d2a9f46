"""A job: the rows of one case that a worker measures, and the events that it sends meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mstpass.bench.gpu.device import Device
from mstpass.bench.gpu.process import Event
from mstpass.bench.gpu.rows import OUT_OF_MEMORY, Case, Known, Settings


class Restart(Exception):
    """The remaining rows need a new process: this one has run out of memory once."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        wanted: the rows to measure.
        known: what is known of the case already.
        send: sends an event to the command.
    """

    settings: Settings
    case: Case
    wanted: tuple[str, ...]
    known: Known
    device: Device
    send: Callable[[Event], None]

    def start(self, row: str, **probe: Any) -> None:
        """Say which row is measured next, or which ``probe`` of it: its time starts now."""
        self.send({"event": "start", "row": row, "probe": probe})

    def finish(self, row: str, status: str, text: str = "", **figures: Any) -> None:
        """Send the outcome of a row.

        Raises:
            Restart: the row ran out of memory.
        """
        outcome = {"status": status, "text": text, **figures}
        self.send({"event": "row", "row": row, "outcome": outcome})
        if status == OUT_OF_MEMORY:
            raise Restart

    def found(self, row: str, **probe: Any) -> None:
        """Send what a probe of a row has found."""
        self.send({"event": "probe", "row": row, "probe": probe})


def job_data(
    settings: Settings, case: Case, wanted: tuple[str, ...], known: Known
) -> dict[str, Any]:
    """The plain data of a job, for another process."""
    return {
        "settings": {**dataclasses.asdict(settings), "out": str(settings.out)},
        "case": dataclasses.asdict(case),
        "wanted": list(wanted),
        "known": dataclasses.asdict(known),
    }


def job_from(data: Mapping[str, Any], device: Device, send: Callable[[Event], None]) -> Job:
    settings, case = data["settings"], data["case"]
    return Job(
        settings=Settings(**{**settings, "out": Path(settings["out"])}),
        case=Case(**{**case, "rows": tuple(case["rows"])}),
        wanted=tuple(data["wanted"]),
        known=Known(**data["known"]),
        device=device,
        send=send,
    )
