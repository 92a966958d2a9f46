"""Plans `mstpass plan`: what fits on a device, for each way to train.

Eager rows are steps run on fake tensors (eager_rows.py). Compiled rows are plans of the traced
joint graph, simulated (compiled_rows.py). All rows add the same fixed bytes (fixed_memory.py).
Where several devices share a sequence, all of this is about one of them (model_step.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

from mstpass.frame_stack import with_deep_stack
from mstpass.graph.device_costs import links_of
from mstpass.planner.background import Background
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.eager_rows import eager_rows
from mstpass.planner.models import build, config_of, sizes_of
from mstpass.planner.notes import notes
from mstpass.planner.progress import Report, silent
from mstpass.planner.request import Request
from mstpass.planner.result import Combination, Point, Row, Split, TrainingPlan
from mstpass.planner.room import Room, traceable
from mstpass.planner.search import combinations_of, with_fastest
from mstpass.planner.speed import DEVICE, step_time
from mstpass.planner.splits import BestSplit, Planned
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.tracing.devices import traced_for

_COMPARES = "plans the rows to compare with (--alone leaves them out)"


def plan(request: Request, report: Report = silent, processes: int = 1) -> TrainingPlan:
    """Plan a request.

    Args:
        report: is told how far each piece of work is.
        processes: with more than one, other processes plan the eager rows and trace the whole
            model meanwhile.

    Raises:
        ModelError: there is no such model.
        DoesNotFit: weights, optimizer states and gradients alone are larger than the device.
        SequenceError: the ranks cannot share the model's sequences.
        UserError: the model's training step cannot be traced.
    """
    return with_deep_stack(_plan, request, report, processes)


def _plan(request: Request, report: Report, processes: int) -> TrainingPlan:
    with traced_for(request.traced_device, request.gpu), contextlib.ExitStack() as stack:
        config = config_of(request.model)
        with FakeTensorMode(), traceable(request):
            sizes = sizes_of(build(config, request.training))
        splits: tuple[Split, ...] = ()
        known: Planned | None = None
        if request.compares_splits:
            best = BestSplit(request, sizes, config, report)
            request, splits, known = best.request, best.splits, best.planned
        combinations: tuple[Combination, ...] = ()
        if request.search:
            combinations = combinations_of(Room(request.of_rank, sizes), config, report)
            request = with_fastest(request, combinations)
        room = Room(request.of_rank, sizes)
        room.check()
        compared: Callable[[], tuple[Row, ...]] = functools.partial(eager_rows, room, report)
        if processes > 1 and request.compares_eager:
            background = Background(eager_rows, (room,), report, _COMPARES)
            compared = stack.enter_context(background).result
        if known is None:
            compiled = CompiledRows(room, config, report, processes)
            known = compiled, compiled.mst_row()
        compiled, own = known
        rows: tuple[Row, ...] = () if request.alone else (compiled.inductor_row(),)
        if request.compares_eager:
            eager, checkpoint, recipe = compared()
            rows = eager, checkpoint, *rows, recipe
        rows = tuple(_whole(row, request.training.sequence_ranks) for row in (*rows, own))
        assumed = tuple(notes(request, config, rows[-1], compiled.square_bytes))
        time = step_time(own.us, own.exchange_us, sizes, request.training)
        more = time, links_of(DEVICE), splits, combinations
        return TrainingPlan(request, sizes, room.fixed, rows, assumed, *more)


def _whole(row: Row, ranks: int) -> Row:
    """The row with lengths of whole sequences, of which each rank has a part."""
    points = (Point(ranks * point.length, point.total_bytes) for point in row.curve)
    return dataclasses.replace(row, length=ranks * row.length, curve=tuple(points))
