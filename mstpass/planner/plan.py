"""Plans `mstpass plan`: what fits on a device, for each way to train.

Eager rows are steps run on fake tensors (eager_rows.py). Compiled rows are plans of the traced
joint graph, simulated (compiled_rows.py). All rows add the same fixed bytes (fixed_memory.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from mstpass.frame_stack import with_deep_stack
from mstpass.planner.background import Background
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.eager_rows import eager_rows
from mstpass.planner.models import build, config_of, sizes_of
from mstpass.planner.notes import notes
from mstpass.planner.progress import Report, silent
from mstpass.planner.request import Request
from mstpass.planner.result import Row, TrainingPlan
from mstpass.planner.room import Room, traceable
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.tracing.devices import traced_for


def plan(request: Request, report: Report = silent, processes: int = 1) -> TrainingPlan:
    """Plan a request.

    Args:
        report: is told how far each piece of work is.
        processes: with more than one, another process plans the eager rows meanwhile.

    Raises:
        ModelError: there is no such model.
        DoesNotFit: weights, optimizer states and gradients alone are larger than the device.
        UserError: the model's training step cannot be traced.
    """
    return with_deep_stack(_plan, request, report, processes)


def _plan(request: Request, report: Report, processes: int) -> TrainingPlan:
    with traced_for(None, request.gpu), contextlib.ExitStack() as stack:
        config = config_of(request.model)
        with FakeTensorMode(), traceable(request):
            sizes = sizes_of(build(config, request.training))
        room = Room(request, sizes)
        room.check()
        compared: Callable[[], tuple[Row, ...]] = functools.partial(eager_rows, room, report)
        if processes > 1 and not request.alone:
            compared = stack.enter_context(Background(eager_rows, (room,), report)).result
        compiled = CompiledRows(room, config, report)
        own = compiled.mst_row()
        rows: tuple[Row, ...] = ()
        if not request.alone:
            inductor = compiled.inductor_row()
            eager, checkpoint, recipe = compared()
            rows = eager, checkpoint, inductor, recipe
        assumed = tuple(notes(request, config, own, compiled.square_bytes))
        return TrainingPlan(request, sizes, room.fixed, (*rows, own), assumed)
