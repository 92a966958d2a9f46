"""What is asked of `mstpass plan`, and what it answers."""

from __future__ import annotations

import dataclasses

from mstpass.errors import UserError
from mstpass.planner.accounting import Fixed, Parts, Sizes, Training

EAGER, CHECKPOINT, INDUCTOR = "eager", "checkpoint per layer", "Inductor"
RECIPE, MST = "MST recipe", "mst"
FREE, LEAST = "free", 0.0  # of memory_budget
EXPANDABLE, CACHING = "expandable", "caching"
ALLOCATORS = (EXPANDABLE, CACHING)
LOGITS, OUTPUTS = ("model", "fp32"), ("held", "dropped")  # eager_recipes.plain says what they are


class DoesNotFit(UserError):
    """Not even a step without activations fits."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked: a model, how it is trained, and the device.

    Attributes:
        length: a given sequence length; None: the longest that fits.
        overhead_bytes: of the device, not to be had for tensors.
        logits: what the eager rows' loss is made from (``LOGITS``).
        outputs: whether the eager rows' loop holds the model's outputs until backward is over
            (``OUTPUTS``).
        allocator: one of ``ALLOCATORS``.
        alone: without the rows to compare with.
    """

    model: str
    training: Training
    device_bytes: int
    overhead_bytes: int
    length: int | None = None
    logits: str = "model"
    outputs: str = "held"
    allocator: str = EXPANDABLE
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, at one length.

    Attributes:
        length: 0 where nothing fits.
        total_bytes: of the device, overhead included.
        memory_budget: mst only: the option to compile with.
        extra_time: mst only: beyond Inductor's step, a fraction, by the cost model of a GPU.
    """

    name: str
    keeps: str
    length: int
    fits: bool
    parts: Parts
    total_bytes: int
    memory_budget: str = ""
    extra_time: float | None = None


@dataclasses.dataclass(frozen=True)
class Planned:
    request: Request
    sizes: Sizes
    fixed: Fixed
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def own(self) -> Row:
        return self.rows[-1]
