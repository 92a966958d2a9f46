"""What a device has for a training step, and the rows of ways to train within it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from mstpass.errors import UserError
from mstpass.planner.allocator_replay import Event, OptimizerStep, Resident, needed_bytes
from mstpass.planner.curve import UP_TO, curve
from mstpass.planner.fixed_memory import (
    Fixed,
    Sizes,
    fixed,
    gradient_bytes,
    optimizer_temporaries,
)
from mstpass.planner.longest_sequence import GRAIN
from mstpass.planner.notes import does_not_fit
from mstpass.planner.request import CACHING, Request
from mstpass.planner.result import DoesNotFit, Parts, Point, Row

_SHORTER = 0.99  # factor of the next length where gaps leave no room

T = TypeVar("T")


class Step(Protocol):
    """A step of forward and backward: what it holds at its peak, its allocations and frees."""

    @property
    def parts(self) -> Parts: ...

    @property
    def events(self) -> Sequence[Event | OptimizerStep]: ...


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory of a device that is left beside what a training loop holds all the time."""

    request: Request
    sizes: Sizes

    @functools.cached_property
    def fixed(self) -> Fixed:
        return fixed(self.sizes, self.request.training)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the device that hold no tensor of the step."""
        return self.fixed.total + self.request.overhead_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of the device that are left for the tensors of the step."""
        return self.request.device_bytes - self.fixed_bytes

    @functools.cached_property
    def at_end(self) -> Parts:
        """What the step holds while the optimizer runs."""
        return Parts(
            gradients=gradient_bytes(self.sizes, self.request.training),
            temporaries=optimizer_temporaries(self.sizes, self.request.training),
        )

    def check(self) -> None:
        """Raise `DoesNotFit` if there is no room for any activation."""
        if self.step_bytes <= self.at_end.total:
            raise DoesNotFit(does_not_fit(self.request, self.sizes))

    def without_gaps(self, parts: Parts) -> Parts:
        """Bytes at the peak of the step or of the optimizer, whichever is higher."""
        return max(parts, self.at_end, key=lambda parts: parts.total)

    def parts(self, step: Step) -> Parts:
        """The same, with the gaps that the allocator leaves."""
        parts = self.without_gaps(step.parts)
        if self.request.allocator != CACHING:
            return parts
        room = self.request.device_bytes - self.request.overhead_bytes
        need = needed_bytes(step.events, self._resident, room)
        return dataclasses.replace(parts, gaps=max(0, need - self.fixed.total - parts.total))

    def with_gaps(self, length: int, step_at: Callable[[int], Step]) -> int:
        """The longest length that fits with gaps, from the longest without them.

        Gaps neither grow nor shrink steadily with the length. The search shortens it by half of
        the relative excess, but by at least one per cent, until the step fits.
        """
        while length > GRAIN and self.request.allocator == CACHING:
            total = self.parts(step_at(length)).total
            if total <= self.step_bytes:
                break
            halved = (1 + self.step_bytes / total) / 2
            length = max(GRAIN, int(min(_SHORTER, halved) * length) // GRAIN * GRAIN)
        return length

    def curve(self, bytes_at: Callable[[int], int], length: int) -> tuple[Point, ...]:
        """The curve of a row of this length, if the request asks for curves."""
        if not self.request.curves:
            return ()
        most_bytes = UP_TO * self.request.device_bytes - self.fixed_bytes
        return curve(bytes_at, length, most_bytes, self.fixed_bytes)

    def row(self, name: str, keeps: str, length: int, step: Step | None, **more: Any) -> Row:
        """The row of a step; None where no length fits."""
        parts = self.parts(step) if step else Parts()
        fits = step is not None and parts.total <= self.step_bytes
        return Row(name, keeps, length, fits, parts, self.fixed_bytes + parts.total, **more)

    @functools.cached_property
    def _resident(self) -> Resident:
        sizes, training = self.sizes, self.request.training
        weight_shards, state_shards = training.weight_shards, training.state_shards
        return Resident(
            weights=tuple(-(-training.weight_bytes * n // weight_shards) for n in sizes.each),
            states=tuple(int(training.state_bytes * n / state_shards) for n in sizes.each),
            temporaries=tuple(int(training.temporary_bytes * n / state_shards) for n in sizes.each),
            gathered=self.fixed.gathered,
        )


def traceable(request: Request, make: Callable[[], T]) -> T:
    """The result of ``make``; what a model's own code raises becomes a `UserError`."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--model {request.model}: its training step cannot be traced: "
            f"{type(error).__name__}: {reason}"
        ) from error
