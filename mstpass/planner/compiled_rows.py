"""The rows of `mstpass plan` that are compiled: plans of the traced joint graph, simulated.

A trace of a deep model takes long. So where all layers are alike, mst's row is found by traces of
few of them, of which one is repeated (deepen.py); else each trace is that of the whole model.

The longest sequence is searched from a length that follows from the model's width. Each length is
traced and planned by itself; the next one is where the bytes of the last ones lead to the limit.
The first trace is scaled to other lengths for what has no plan of its own there: Inductor's row,
and the curve.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mstpass.limit import simulated_limit
from mstpass.memory.allocation import BLOCK
from mstpass.planner import compiled_step
from mstpass.planner.deepen import NoShallowCopy, deepened
from mstpass.planner.lengths import MOST, START, TOLERANCE, longest, next_length, rounded
from mstpass.planner.models import are_alike, build, layer_count
from mstpass.planner.request import INDUCTOR, MST, Point, Report, Row
from mstpass.planner.room import Room, traceable
from mstpass.planner.traced_step import SequenceError, TracedStep, trace

_KEEPS_INDUCTOR = (
    "keeps the fewest bytes from which backward needs no matmul or attention a second time; "
    "kernels are fused"
)
_REPEATED = 4  # layers of a copy that is deepened
_FINE = 0.002  # of a length: what such copies are planned once more for
_STATES = 10  # of a layer, for each token at the peak of the least memory: about
_START = 2**16  # tokens, where the width is not known
_NEAR = 0.5  # of its length: as short as a plan is scaled, and by the same factor as long
_LEAP = 16
_TRIES = 8


class CompiledRows:
    """Plans mst's row first; Inductor's row then scales mst's first trace."""

    def __init__(self, room: Room, config: Any, report: Report):
        self.room, self.config = room, config
        self.request, self.training = room.request, room.request.training
        self._report = report
        self._scaled: TracedStep | None = None  # the first trace, which can be scaled
        self.square_bytes = 0  # of the largest mask or scores of mst's row

    # ---- mst's row -----------------------------------------------------------------------------
    def mst_row(self) -> Row:
        """The fastest plan that fits, at the given length or else at the longest that fits."""
        try:
            row = self._row(self._layers)
        except NoShallowCopy:
            self._scaled = None
            row = self._row()
        if self.request.curves:
            row = dataclasses.replace(row, curve=self._curve(row.length))
        return row

    def about_longest(self) -> int:
        """About the longest length that fits, by a plan that is scaled; 0: none fits."""
        layers, length, found = self._layers, self._start(), 0
        for _ in range(_TRIES):
            try:
                traced = self._trace(length, (compiled_step.LEAST,), BLOCK, layers)
            except NoShallowCopy:
                layers = None
                continue
            found = self._longest(traced)
            if _NEAR <= found / traced.length <= 1 / _NEAR:
                break
            # chunks are as long as they were traced, so that shorter sequences may fit none
            length = found or max(BLOCK, traced.length // _LEAP)
        return found

    def _longest(self, traced: TracedStep) -> int:
        """The longest length that fits with the plan of the traced one."""
        plan = self._least(traced, traced.length).plan
        bytes_at = lambda n: self._bytes(
            compiled_step.step_of_plan(traced, n, compiled_step.LEAST, plan)
        )
        return longest(bytes_at, self.room.step_bytes, traced.length, tolerance=0)

    @functools.cached_property
    def _layers(self) -> int | None:
        """The layers of a copy that is deepened; None: only the whole model is known to do."""
        if layer_count(self.config) < 2 * _REPEATED:
            return None
        with torch.device("meta"), traceable(self.request):
            model = build(copy.deepcopy(self.config), self.training)
        return _REPEATED if are_alike(model) else None

    def _start(self) -> int:
        """A length that is hardly more than half as long, or twice as long, as the longest."""
        width = getattr(self.config.get_text_config(), "hidden_size", 0)
        if not width:
            return _START
        token_bytes = _STATES * width * self.training.batch * self.training.weight_bytes
        return rounded(min(self.room.step_bytes / token_bytes, MOST))

    def _row(self, layers: int | None = None) -> Row:
        """The row of the given length, or of the longest that fits; ``layers`` as of `_row_at`."""
        if self.request.length is not None:
            return self._row_at(self.request.length, layers)
        row = self._row_at(self._start(), layers, BLOCK)
        rows, is_last = {row.length: row}, False
        for _ in range(_TRIES):
            length = self._next_length(rows, row, TOLERANCE if layers is None else _FINE)
            if length is None or is_last:
                break
            fits = max((n for n in rows if self._fits(rows[n])), default=0)
            is_last = fits < length <= (1 + TOLERANCE) * fits  # one more for so little
            rows[length] = row = self._row_at(length, layers)
        return rows[max((n for n in rows if self._fits(rows[n])), default=min(rows))]

    def _row_at(self, length: int, layers: int | None = None, multiple: int | None = None) -> Row:
        """The row of a length, traced anew.

        Args:
            layers: of the copy that is deepened; None: the whole model.
            multiple: as of `trace`.
        """
        options = self._options
        budgets = options if self._scaled else (compiled_step.FREE, *options)
        traced = self._trace(length, budgets, multiple, layers)
        self.square_bytes = traced.square_bytes
        self._scaled = self._scaled or traced
        return self._fastest(traced, options)

    @property
    def _options(self) -> tuple[object, ...]:
        """The budgets that are tried: at the longest length, only the least memory fits."""
        if self.request.length is None:
            return (compiled_step.LEAST,)
        return (compiled_step.FREE, self.room.step_bytes, compiled_step.LEAST)

    def _fits(self, row: Row) -> bool:
        on_device = row.parts.total <= self.room.step_bytes
        return on_device and row.host_bytes <= self.request.host_bytes

    def _next_length(self, rows: Mapping[int, Row], last: Row, tolerance: float) -> int | None:
        """The length to plan next, if all but gradients grow with the length; None: no other."""
        total = lambda row: row.parts.total
        fits = max((n for n in rows if self._fits(rows[n])), default=0)
        points = {n: total(row) for n, row in rows.items() if n >= fits}  # others: other plans
        growing = max(1, total(last) - last.parts.gradients)
        guess = last.length * (1 + (self.room.step_bytes - total(last)) / growing)
        return next_length(points, self.room.step_bytes, last.length, guess, tolerance)

    def _curve(self, length: int) -> tuple[Point, ...]:
        """What other lengths take with the plan of the longest one."""
        assert self._scaled is not None, "the scaled is known"
        plan = self._least(self._scaled, length).plan
        step_at = functools.partial(
            compiled_step.step_of_plan, self._scaled, option=compiled_step.LEAST, plan=plan
        )
        return self.room.curve(lambda n: self.room.parts(step_at(n)).total, length)

    def _fastest(self, traced: TracedStep, options: Sequence[object]) -> Row:
        """The row of the first plan that fits: free, within the step's bytes, of least memory."""
        most = simulated_limit(self.room.step_bytes)
        for option in options:
            limit = {compiled_step.FREE: None, compiled_step.LEAST: 0}.get(option, most)
            self._report(f"{MST}: {traced.length:,} tokens, memory_budget={_text(option)}")
            step = compiled_step.planned(traced, traced.length, option, limit)
            parts = self.room.parts(step)
            if parts.total <= (most if limit else self.room.step_bytes):
                break
        return self.room.row(
            MST,
            step.kept,
            traced.length,
            step,
            memory_budget=_text(option),
            extra_time=step.us / self._inductor_us(traced.length) - 1,
            us=step.us,
            exchange_us=step.exchange_us,
            narrow=step.narrow,
        )

    def _least(self, traced: TracedStep, length: int) -> compiled_step.CompiledStep:
        self._report(f"{MST}: {length:,} tokens, memory_budget={_text(compiled_step.LEAST)}")
        return compiled_step.planned(traced, length, compiled_step.LEAST, 0)

    # ---- Inductor's row ------------------------------------------------------------------------
    def inductor_row(self) -> Row:
        """Inductor's row, from mst's trace: without loops, the problem scales to every length."""
        assert self._scaled is not None, "mst's row comes first"
        step_at = functools.cache(functools.partial(compiled_step.inductor_step, self._scaled))
        limit = self.room.step_bytes
        self._report(INDUCTOR)
        return self.room.searched_row(
            INDUCTOR,
            _KEEPS_INDUCTOR,
            step_at,
            lambda: longest(lambda n: self._bytes(step_at(n)), limit, START, tolerance=0),
            lambda n: self.room.parts(step_at(n)).total,
        )

    def _inductor_us(self, length: int) -> float:
        """The time of Inductor's step."""
        assert self._scaled is not None, "the rows of lengths come first"
        return compiled_step.inductor_step(self._scaled, length).us

    def _bytes(self, step: compiled_step.CompiledStep) -> int:
        return self.room.parts(step).total

    def _trace(
        self,
        length: int,
        budgets: Sequence[object],
        multiple: int | None = None,
        layers: int | None = None,
    ) -> TracedStep:
        """The traced step of the model; with ``layers``, that of its first layers, of which one is
        repeated until there are as many as the model has."""
        of_layers = f", {layers} layers" if layers else ""
        self._report(f"{MST}: tracing {length:,} tokens{of_layers}")
        host_bytes = self.request.host_bytes
        different = tuple(dict.fromkeys(budgets))
        given = self.config, self.training, length, different, multiple, layers, host_bytes
        with traceable(self.request):
            try:
                traced = trace(*given)
            except Exception as error:  # a model's own code may need all of its layers
                if layers is None or isinstance(error, SequenceError):
                    raise
                raise NoShallowCopy(str(error)) from error
        return traced if layers is None else deepened(traced, layers, layer_count(self.config))


def _text(memory_budget: object) -> str:
    if isinstance(memory_budget, int):
        return f"{memory_budget >> 20}MiB"
    return str(memory_budget)
