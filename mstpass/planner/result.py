"""The output of `mstpass plan`: for each way to train, its length and its memory."""

from __future__ import annotations

import dataclasses

from mstpass.errors import UserError
from mstpass.planner.fixed_memory import Fixed, Sizes
from mstpass.planner.request import Request

EAGER, CHECKPOINT, INDUCTOR = "eager", "checkpoint per layer", "Inductor"
RECIPE, MST = "MST recipe", "mst"


class DoesNotFit(UserError):
    """Weights, optimizer states and gradients alone are larger than the device."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes that a step holds at its peak, besides the fixed ones.

    Attributes:
        gradients: gradients of parameters.
        saved: values that the forward saves for the backward.
        logits: tensors of tokens x vocabulary, whether saved or not.
        loops: one chunk of the loop that runs at the peak.
        other: other activations, their gradients, recomputed values, and workspaces of kernels.
        temporaries: values that exist while the optimizer's step runs.
        gaps: bytes that the allocator holds between tensors.
    """

    gradients: int = 0
    saved: int = 0
    logits: int = 0
    loops: int = 0
    other: int = 0
    temporaries: int = 0
    gaps: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Point:
    """A sequence length in tokens, and the bytes of a device on which a step of it fits."""

    length: int
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, at one sequence length.

    Attributes:
        name: one of the names above, such as ``EAGER``.
        keeps: in words, what this way keeps for its backward.
        length: tokens of a sequence; 0 where no length fits.
        total_bytes: bytes of the device at the peak, overhead included.
        memory_budget: mst's row only: the value of the option to compile with.
        extra_time: mst's row only: time beyond Inductor's step, as a fraction of that step, by the
            cost model for GPUs.
        host_bytes: mst's row only: pinned host memory in which saved values wait.
        curve: what other lengths take, the shortest first; empty unless the request asks for it.
    """

    name: str
    keeps: str
    length: int
    fits: bool
    parts: Parts
    total_bytes: int
    memory_budget: str = ""
    extra_time: float | None = None
    host_bytes: int = 0
    curve: tuple[Point, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """All rows of a plan; mst's row is the last."""

    request: Request
    sizes: Sizes
    fixed: Fixed
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def own(self) -> Row:
        return self.rows[-1]
