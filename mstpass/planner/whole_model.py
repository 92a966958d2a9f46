"""The trace of a whole model, beside which a copy of few layers is searched (compiled_rows.py)."""

from __future__ import annotations

import contextlib
from types import TracebackType

from mstpass.errors import UserError
from mstpass.planner.background import Background
from mstpass.planner.compiled_step import LEAST
from mstpass.planner.deepen import is_same
from mstpass.planner.models import config_of
from mstpass.planner.progress import WHOLE, Report, Steps
from mstpass.planner.room import Room, traceable
from mstpass.planner.traced_step import TracedStep, trace
from mstpass.tracing.devices import traced_for

_WHAT = "traces the whole model"


class WholeModel:
    """The whole model's trace at one length; with a process to spare, it is made meanwhile.

    Args:
        length, multiple: as of `trace`.
        processes: with more than one, another process traces the model while the block runs.
        report: is told how far the trace is.
    """

    def __init__(
        self, room: Room, length: int, multiple: int | None, processes: int, report: Report
    ):
        self._args, self._report = (room, length, multiple), report
        self._stack = contextlib.ExitStack()
        self._background: Background | None = None
        if processes > 1:
            background = Background(_in_process, self._args, report, _WHAT)
            self._background = self._stack.enter_context(background)

    def __enter__(self) -> WholeModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def is_like(self, copy: TracedStep) -> bool:
        """Whether the model's problem is that of a deepened copy, but for names."""
        return is_same(copy.problems[LEAST], self._traced().problems[LEAST])

    def _traced(self) -> TracedStep:
        if self._background is not None:
            # It was killed, as where memory runs out; the model's own error is raised again below.
            with contextlib.suppress(UserError):
                found: TracedStep = self._background.result()
                return found
        return whole_step(*self._args, self._report)


def whole_step(room: Room, length: int, multiple: int | None, report: Report) -> TracedStep:
    """The traced step of a request's model, with the problem of the least memory."""
    request, steps = room.request, Steps(report, WHOLE, 1)
    steps.begin(f"tracing {length:,} tokens")
    config, host_bytes = config_of(request.model), request.host_bytes
    with traceable(request):
        found = trace(config, request.training, length, (LEAST,), multiple, None, host_bytes)
    steps.end()
    return found


def _in_process(room: Room, length: int, multiple: int | None, report: Report) -> TracedStep:
    with traced_for(room.request.traced_device, room.request.gpu):
        return whole_step(room, length, multiple, report)
