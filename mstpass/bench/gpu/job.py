"""A job: the row that a process of its own measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mstpass.bench.gpu.device import Device
from mstpass.bench.gpu.state import Case, Outcome, Settings


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be measured.

    Attributes:
        known: the outcomes of the case's other rows.
    """

    settings: Settings
    case: Case
    row: str
    device: Device
    known: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)


def outcome(status: str, text: str = "", **figures: Any) -> Outcome:
    """The outcome of a row."""
    return {"status": status, "text": text, **figures}
