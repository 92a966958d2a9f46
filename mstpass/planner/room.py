"""What a device has for a training step, and the rows of ways to train within it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mstpass.errors import UserError
from mstpass.planner.lengths import UP_TO, curve
from mstpass.planner.request import DoesNotFit, Parts, Point, Request, Row, gib
from mstpass.planner.training import Fixed, Sizes, fixed

_MOST_RANKS = 2**12


class Step(Protocol):
    """A step of forward and backward: what it holds at its peak."""

    @property
    def parts(self) -> Parts: ...

    @property
    def host_bytes(self) -> int: ...


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
        sizes, training = self.sizes, self.request.training
        gradients = training.weight_bytes * sizes.parameters // training.gradient_shards
        updated = sizes.parameters  # at once
        if training.optimizer_in_backward:
            gradients, updated = 0, max(sizes.each, default=0)
        temporaries = int(training.temporary_bytes * updated / training.state_shards)
        return Parts(gradients=gradients, temporaries=temporaries)

    def check(self) -> None:
        """Raise `DoesNotFit` if there is no room for any activation."""
        if self.step_bytes <= self.at_end.total:
            raise DoesNotFit(_does_not_fit(self))

    def parts(self, step: Step) -> Parts:
        """Bytes at the peak of the step or of the optimizer, whichever is higher."""
        return max(step.parts, self.at_end, key=lambda parts: parts.total)

    def curve(self, bytes_at: Callable[[int], int], length: int) -> tuple[Point, ...]:
        """The curve of a row of this length, if the request asks for curves."""
        if not self.request.curves:
            return ()
        most_bytes = UP_TO * self.request.device_bytes - self.fixed_bytes
        return curve(bytes_at, length, most_bytes, self.fixed_bytes)

    def searched_row(
        self,
        name: str,
        keeps: str,
        step_at: Callable[[int], Step],
        longest: Callable[[], int],
        bytes_at: Callable[[int], int],
    ) -> Row:
        """The row of the given length, or else of the longest.

        Args:
            longest: finds the longest length that fits.
            bytes_at: what a step takes, for the curve.
        """
        length = self.request.length
        if length is None:
            length = longest()
        step = step_at(length) if length else None
        return self.row(name, keeps, length, step, curve=self.curve(bytes_at, length))

    def row(self, name: str, keeps: str, length: int, step: Step | None, **more: Any) -> Row:
        """The row of a step; None where no length fits."""
        parts, host_bytes = (self.parts(step), step.host_bytes) if step else (Parts(), 0)
        on_device = step is not None and parts.total <= self.step_bytes
        fits = on_device and host_bytes <= self.request.host_bytes
        total_bytes = self.fixed_bytes + parts.total
        return Row(name, keeps, length, fits, parts, total_bytes, host_bytes=host_bytes, **more)


def _does_not_fit(room: Room) -> str:
    """The error where no activation fits: the bytes of each part, and changes that would fit."""
    request, held, at_end = room.request, room.fixed, room.at_end
    return (
        f"{request.model} does not fit on {gib(request.device_bytes)}: weights "
        f"{gib(held.weights)}, optimizer states {gib(held.optimizer_states)}, gradients "
        f"{gib(at_end.gradients)}, gathered {gib(held.gathered)}, the optimizer's step "
        f"{gib(at_end.temporaries)} and overhead {gib(request.overhead_bytes)} are "
        f"{gib(at_end.total - room.step_bytes)} too much, before any activation. "
        f"{_what_would_fit(room)}"
    )


def _what_would_fit(room: Room) -> str:
    training = room.request.training

    def fits(**changes: Any) -> bool:
        changed = dataclasses.replace(training, **changes)
        other = Room(dataclasses.replace(room.request, training=changed), room.sizes)
        return other.at_end.total < other.step_bytes

    eightbit, bf16 = {"optimizer": "adamw-8bit"}, {"dtype": "bf16"}
    foreach = training.optimizer_step == "foreach"
    found = ["--optimizer-step compiled"] if foreach and fits(optimizer_step="compiled") else []
    found += ["--optimizer adamw-8bit"] if fits(**eightbit) else []
    found += ["--dtype bf16"] if training.dtype != "bf16" and fits(**bf16) else []
    if not found and fits(**eightbit, **bf16, master_weights=False):
        found = ["--dtype bf16 --optimizer adamw-8bit without --master-weights"]
    ranks = max(2, training.sequence_ranks)  # a multiple of those that share a sequence
    while ranks <= _MOST_RANKS and not fits(sharding="zero3", ranks=ranks):
        ranks *= 2
    if ranks <= _MOST_RANKS:
        found.append(f"--sharding zero3 --gpus {ranks}")
    if not found:
        return "No optimizer and no sharding makes it fit: choose a smaller model or more memory."
    return f"It would fit with {', or with '.join(found)}."


@contextlib.contextmanager
def traceable(request: Request) -> Iterator[None]:
    """What a model's own code raises in here becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--model {request.model}: its training step cannot be traced: "
            f"{type(error).__name__}: {reason}"
        ) from error
