"""Plans `mstpass plan`: what fits on a device, for each way to train.

Eager rows are steps run on fake tensors (eager_rows.py). Compiled rows are plans of the traced
joint graph, simulated (compiled_rows.py). All rows add the same fixed bytes (training.py).
Where several devices share a sequence, all of this is about one of them (traced_step.py).

Sentences beside a plan: what is assumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from mstpass.frame_stack import with_deep_stack
from mstpass.graph.device_costs import kind_of_gpu
from mstpass.planner.background import background
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.eager_rows import eager_rows
from mstpass.planner.models import build, config_of, most_positions, sizes_of
from mstpass.planner.request import (
    INDUCTOR,
    MST,
    Combination,
    Point,
    Report,
    Request,
    Row,
    Split,
    TrainingPlan,
    gib,
    silent,
)
from mstpass.planner.room import Room, traceable
from mstpass.planner.search import (
    DEVICE,
    BestSplit,
    Planned,
    combinations_of,
    step_time,
    with_fastest,
)
from mstpass.planner.training import FLASH, Training
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.tracing.devices import traced_for


def notes(request: Request, config: Any, own: Row, square_bytes: int) -> Iterator[str]:
    """The assumptions behind a plan's figures.

    Args:
        own: mst's row.
        square_bytes: of its largest mask or scores of tokens x tokens; 0: there are none.
    """
    training, most = request.training, most_positions(config)
    yield (
        "These figures are simulated; nothing was measured on the device. "
        f"{_attention(training, square_bytes)}"
    )
    yield (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True when you train. PyTorch's default "
        "allocator leaves gaps between tensors, which are not counted."
    )
    if most is not None and own.length > most:
        yield (
            f"{own.length} tokens are more than the model's {most} positions: extend its position "
            "embeddings (rope scaling) before you train at this length."
        )
    if training.optimizer_in_backward:
        yield (
            f"{INDUCTOR} and {MST} hold all gradients until the backward is over, because a "
            "compiled backward returns them together. The other rows free each gradient once the "
            "optimizer has used it."
        )
    if training.gradient_shards > 1:
        yield (
            f"The rows of {INDUCTOR} and {MST} assume that each gradient is reduced where it is "
            "computed, by collectives in the compiled graphs."
        )
    if own.host_bytes:
        yield (
            f"{gib(own.host_bytes)} of pinned host memory hold saved values, in blocks of powers "
            "of two. Copies run beside computation; what the device waits for them is part of the "
            "extra time."
        )
    for call in own.narrow:
        yield f"This length is too long for a kernel: {call}"
    if own.fits and own.memory_budget == "0.0":
        yield (
            "This is mst's plan of least memory: no smaller plan is left if the measured peak is "
            "higher than the simulated one."
        )


def _attention(training: Training, square_bytes: int) -> str:
    if training.attention == FLASH:
        return (
            "Attention is FlashAttention-2 as CUDA runs it, its backward's workspace included; "
            "windows and causal masks take no memory. That is attn_implementation="
            "'flash_attention_2', which may not be the model's own."
        )
    if training.shares:
        return (
            "Attention is that of mstpass.sequence_parallel, as CUDA runs it; the time of its "
            "exchanges and of sharding is estimated."
        )
    own = (
        "Attention is the model's own, as CUDA runs it, in a model that mstpass.compile has "
        "compiled and that is called without an attention mask and without position ids: "
    )
    if not square_bytes:
        return f"{own}it needs no mask, and its backward's workspace is included."
    return (
        f"{own}its masks or scores of tokens x tokens take {gib(square_bytes)} each. A kernel that "
        "knows windows needs none: --attention flash plans with one."
    )


# ---- the plan ------------------------------------------------------------------------------------
_COMPARES = "plans the rows to compare with (--alone leaves them out)"


def plan(request: Request, report: Report = silent, processes: int = 1) -> TrainingPlan:
    """Plan a request.

    Args:
        report: is told how far each piece of work is.
        processes: with more than one, another process plans the eager rows meanwhile.

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
            compared = stack.enter_context(background(eager_rows, (room,), _COMPARES))
        if known is None:
            compiled = CompiledRows(room, config, report)
            known = compiled, compiled.mst_row()
        compiled, own = known
        rows: tuple[Row, ...] = () if request.alone else (compiled.inductor_row(),)
        if request.compares_eager:
            eager, checkpoint, recipe = compared()
            rows = eager, checkpoint, *rows, recipe
        rows = tuple(_whole(row, request.training.sequence_ranks) for row in (*rows, own))
        assumed = tuple(notes(request, config, rows[-1], compiled.square_bytes))
        time = step_time(own.us, own.exchange_us, sizes, request.training)
        more = time, kind_of_gpu(DEVICE).links, splits, combinations
        return TrainingPlan(request, sizes, room.fixed, rows, assumed, *more)


def _whole(row: Row, ranks: int) -> Row:
    """The row with lengths of whole sequences, of which each rank has a part."""
    points = (Point(ranks * point.length, point.total_bytes) for point in row.curve)
    return dataclasses.replace(row, length=ranks * row.length, curve=tuple(points))
