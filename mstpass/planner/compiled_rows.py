"""The rows of `mstpass plan` that are compiled: plans of the traced joint graph, simulated.

A trace of a deep model takes long. So mst's row is found by a trace of few layers, of which one is
repeated (deepen.py); the whole model is traced once, to see that its problem is the same. Where
layers are not alike, the search for the longest sequence makes few traces::

    guess    shallow copies of the model are traced, and their lengths extrapolated to its depth
    search   the model is traced at about that length and planned; the plan is scaled to the
             length at which it just fits
    exact    the model is traced at that length, and planned for the row of the table

A plan that is found at one length is simulated at others before the next plan is looked for. Where
the plan of the exact length leaves room for a sequence that is longer by more than one per cent,
the model is traced and planned at that length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mstpass.limit import simulated_limit
from mstpass.memory.allocation import BLOCK
from mstpass.planner import compiled_step, request
from mstpass.planner.background import WholeModel
from mstpass.planner.deepen import NoShallowCopy, deepened
from mstpass.planner.lengths import GRAIN, MOST, START, TOLERANCE, longest, next_length, rounded
from mstpass.planner.models import has_kinds_of_layers, layer_count
from mstpass.planner.request import INDUCTOR, MST, Point, Report, Row, Steps
from mstpass.planner.room import Room, traceable
from mstpass.planner.traced_step import SequenceError, TracedStep, trace

_KEEPS_INDUCTOR = (
    "keeps the fewest bytes from which backward needs no matmul or attention a second time; "
    "kernels are fused"
)
_FEW_LAYERS, _LAYERS_LEFT = 2, 1 / 8  # of the shallow copies; at least twice as many in the other
_REPEATED = 4  # layers of a copy that is deepened
_FINE = 0.002  # of a length: what such copies are planned once more for
_STATES = 10  # of a layer, for each token at the peak of the least memory: about
_SHALLOW_START = 2**16  # tokens
_NEAR = (0.5, 2.0)  # a trace is scaled to lengths between these multiples of its own
_FAR = (1 / 16, 16.0)  # the same for a guess
_LEAP = 16
_CLOSE = 0.1  # a plan is not looked for anew at a length that differs by less
_AS_SCALED = 0.999  # of a length found on a scaled trace: at that of its own, sizes round otherwise
_TRIES = 8
_BUDGET_TRIES = 3


class CompiledRows:
    """Plans mst's row first; Inductor's row then scales mst's last trace."""

    def __init__(self, room: Room, config: Any, report: Report, processes: int = 1):
        self.room, self.config = room, config
        self.request, self.training = room.request, room.request.training
        self._report, self._processes = report, processes
        self._scaled: TracedStep | None = None  # the last trace that can be scaled
        self._copy: TracedStep | None = None  # the first one of a copy that was deepened
        self.square_bytes = 0  # of the largest mask or scores of mst's row

    # ---- mst's row -----------------------------------------------------------------------------
    def mst_row(self) -> Row:
        """The fastest plan that fits, at the given length or else at the longest that fits."""
        given, steps = self.request.length, Steps(self._report, MST, 4)
        row = self._deepened_row(steps)
        Steps(self._report, request.WHOLE, 1).end()
        if row is None:
            self._scaled = None
            row_at = functools.partial(self._row_at, steps=steps)
            row = self._longest_row(self._search(), row_at) if given is None else row_at(given)
        if self.request.curves:
            row = dataclasses.replace(row, curve=self._curve(row.length, steps))
        steps.end()
        return row

    def _deepened_row(self, steps: Steps) -> Row | None:
        """The row of a shallow copy whose layers are repeated, which is the whole model.

        The whole model is traced once, at the length of the copy's first trace. None if its problem
        is another one, if the layers of the copy are not alike, or if no length fits.
        """
        if layer_count(self.config) < 2 * _REPEATED or has_kinds_of_layers(self.config):
            return None
        given = self.request.length
        length, multiple = (self._start(), BLOCK) if given is None else (given, None)
        with WholeModel(self.room, length, multiple, self._processes, self._report) as whole:
            try:
                row = self._row_of_copy(steps)
            except NoShallowCopy:
                return None
            is_whole = row is not None and self._copy is not None and whole.is_like(self._copy)
        return row if is_whole else None

    def _row_of_copy(self, steps: Steps) -> Row | None:
        """The row of the copy; None if no length fits."""
        given = self.request.length
        if given is not None:
            return self._row_at(given, steps, layers=_REPEATED)
        Steps(self._report, request.GUESS, 1).end()
        search = Steps(self._report, request.SEARCH, 8)
        length = self._near(self._start(), search, _REPEATED)
        row_at = functools.partial(self._row_at, steps=search, layers=_REPEATED)
        row = self._longest_row(length, row_at, _FINE) if length else None
        search.end()
        return row if row is not None and row.fits else None

    def _start(self) -> int:
        """A length that is hardly more than half as long, or twice as long, as the longest."""
        width = getattr(self.config.get_text_config(), "hidden_size", 0)
        if not width:
            return _SHALLOW_START
        token_bytes = _STATES * width * self.training.batch * self.training.weight_bytes
        return rounded(min(self.room.step_bytes / token_bytes, MOST))

    def _longest_row(
        self,
        length: int,
        row_at: Callable[[int], Row],
        tolerance: float = TOLERANCE,
    ) -> Row:
        """The row of the longest length that fits, from one that is close to it.

        A finer tolerance is that of the first row: it leads to one longer row that fits, at most.
        """
        rows: dict[int, Row] = {}
        for _ in range(_TRIES):
            rows[length] = row = row_at(length)
            another = self._next_length(rows, row, tolerance if len(rows) == 1 else TOLERANCE)
            is_second = tolerance < TOLERANCE and sum(one.fits for one in rows.values()) > 1
            if another is None or is_second:
                break
            length = another
        return rows[max((n for n in rows if rows[n].fits), default=min(rows))]

    def _row_at(
        self,
        length: int,
        steps: Steps,
        layers: int | None = None,
    ) -> Row:
        """The row of a length, traced anew.

        Args:
            layers: of the copy that is deepened; None: the whole model.
        """
        traced = self._trace(length, self._options(length), steps, None, layers, layers is not None)
        self.square_bytes = traced.square_bytes
        self._scaled = self._scaled or traced
        return self._fastest(traced, self._options(length), steps)

    def _options(self, length: int) -> tuple[object, ...]:
        """The budgets that are tried: at the longest length, only the least memory fits."""
        if self.request.length is None and length < MOST:
            return (compiled_step.LEAST,)
        return (compiled_step.FREE, *self._between, compiled_step.LEAST)

    def _next_length(self, rows: Mapping[int, Row], last: Row, tolerance: float) -> int | None:
        """The length to plan next, if all but gradients grow with the length; None: no other.

        Gaps do not grow so: where they count, each length of the search has a plan of its own.
        """
        if last.fits and self.request.allocator == request.CACHING:
            return None
        fits = max((n for n in rows if rows[n].fits), default=0)  # shorter ones have other plans
        points = {n: row.parts.total for n, row in rows.items() if n >= fits}
        spare = self.room.step_bytes - last.parts.total
        growing = max(1, last.parts.total - last.parts.gradients)
        guess = last.length * (1 + spare / growing)
        return next_length(points, self.room.step_bytes, last.length, guess, tolerance)

    def _curve(self, length: int, steps: Steps) -> tuple[Point, ...]:
        """What other lengths take with the plan of the longest one."""
        assert self._scaled is not None, "the scaled is known"
        plan = self._least(self._scaled, length, steps).plan
        step_at = functools.partial(
            compiled_step.step_of_plan, self._scaled, option=compiled_step.LEAST, plan=plan
        )
        return self.room.curve(lambda n: self.room.parts(step_at(n)).total, length)

    @property
    def _between(self) -> tuple[object, ...]:
        """The budget between the fastest plan and that of least memory, as often as it is tried.

        At the longest length there is no room for such a plan.
        """
        given = self.request.length is not None
        return (self.room.step_bytes,) * _BUDGET_TRIES if given else ()

    def _fastest(self, traced: TracedStep, options: Sequence[object], steps: Steps) -> Row:
        """The row of the first plan that fits: free, within the step's bytes, of least memory.

        Solvers do not see gaps. The budget of the second plan therefore shrinks by what its step
        takes too much.
        """
        room = step_bytes = self.room.step_bytes
        for option in options:
            limit = {compiled_step.FREE: None, compiled_step.LEAST: 0}.get(
                option, simulated_limit(room)
            )
            budget = room if limit else option
            steps.begin(f"{traced.length:,} tokens, memory_budget={_text(budget)}")
            step = compiled_step.planned(traced, traced.length, option, limit)
            parts = self.room.parts(step)
            allowed = simulated_limit(step_bytes) if limit else step_bytes
            excess = parts.total - allowed
            if excess <= 0:
                break
            if limit:
                room = max(1, room - excess)
        return self.room.row(
            MST,
            step.kept,
            traced.length,
            step,
            memory_budget=_text(budget),
            extra_time=step.us / self._inductor_us(traced.length) - 1,
            us=step.us,
            exchange_us=step.exchange_us,
            narrow=step.narrow,
        )

    # ---- the search for its length -------------------------------------------------------------
    def about_longest(self) -> int:
        """About the longest length that fits, in less time than `mst_row` takes; 0: none fits."""
        guess = self._guess()
        return self._search() if guess is None else guess

    def _search(self) -> int:
        """About the longest length that fits, by traces that are scaled."""
        guess, steps = self._guess() or START, Steps(self._report, request.SEARCH, 3)
        length = self._near(guess, steps)
        steps.end()
        return length

    def _near(self, start: int, steps: Steps, layers: int | None = None) -> int:
        """The same from a first guess; ``layers`` as of ``_row_at``."""
        how = steps, layers, 1, layers is not None
        length, self._scaled = self._longest_traced(
            start, (compiled_step.FREE, compiled_step.LEAST), _NEAR, *how
        )
        traced = self._scaled
        if length:
            length = self.room.with_gaps(length, lambda n: self._least(traced, n, steps))
        return rounded(_AS_SCALED * length)

    def _longest_traced(
        self,
        start: int,
        budgets: tuple[object, ...],
        near: tuple[float, float],
        steps: Steps,
        layers: int | None = None,
        plans: int = _TRIES,
        deepen: bool = False,
    ) -> tuple[int, TracedStep]:
        """The longest length that fits (0: none does), and the trace near it that was scaled."""
        length = start
        for _ in range(_TRIES):
            traced = self._trace(length, budgets, steps, BLOCK, layers, deepen)
            length = self._longest(traced, near, steps, plans)
            if length and _is_near(length, traced, near):
                break
            # chunks are as long as they were traced, so that shorter sequences may fit none
            if not length and traced.length > BLOCK:
                length = traced.length // _LEAP
        return length, traced

    def _guess(self) -> int | None:
        """The length that shallow copies of the model lead to; None where there are none.

        The bytes for each token grow with about the square root of the depth: checkpoints are that
        far apart. (With nested checkpoints they grow more slowly.)
        """
        depth, few = layer_count(self.config), _FEW_LAYERS
        more = max(2 * few, int(_LAYERS_LEFT * depth))
        if depth < 2 * more:
            return None
        steps = Steps(self._report, request.GUESS, 4)
        try:
            few_length = self._shallow_length(few, _SHALLOW_START, steps)
            lengths = few_length, self._shallow_length(more, few_length or _SHALLOW_START, steps)
        except NoShallowCopy:
            return None
        finally:
            steps.end()
        if not all(lengths):
            return GRAIN
        # Bytes for each token are in proportion to 1 / length, and affine in the depth's root.
        few_bytes, more_bytes = (1 / length for length in lengths)
        slope = (more_bytes - few_bytes) / (math.sqrt(more) - math.sqrt(few))
        return int(1 / (more_bytes + max(0, slope) * (math.sqrt(depth) - math.sqrt(more))))

    def _shallow_length(self, layers: int, start: int, steps: Steps) -> int:
        return self._longest_traced(start, (compiled_step.LEAST,), _FAR, steps, layers)[0]

    def _longest(
        self, traced: TracedStep, near: tuple[float, float], steps: Steps, plans: int = _TRIES
    ) -> int:
        """The longest length that fits; its plan is looked for only near the trace's own length.

        Args:
            plans: the most plans that are looked for, each at the length that the last one led to.
        """
        length = traced.length
        for _ in range(plans):
            step = self._least(traced, length, steps)
            found = longest(
                lambda n, plan=step.plan: self._bytes(
                    compiled_step.step_of_plan(traced, n, compiled_step.LEAST, plan)
                ),  # type: ignore[misc]
                self.room.step_bytes,
                length,
                tolerance=0,
            )
            is_same = abs(found - length) <= max(GRAIN, _CLOSE * length)
            length = found
            if length == 0 or is_same or not _is_near(length, traced, near):
                break
        return length

    def _least(self, traced: TracedStep, length: int, steps: Steps) -> compiled_step.CompiledStep:
        steps.begin(f"{length:,} tokens, memory_budget={_text(compiled_step.LEAST)}")
        return compiled_step.planned(traced, length, compiled_step.LEAST, 0)

    # ---- Inductor's row ------------------------------------------------------------------------
    def inductor_row(self) -> Row:
        """Inductor's row, from mst's trace: without loops, the problem scales to every length."""
        assert self._scaled is not None, "mst's row comes first"
        step_at = functools.cache(functools.partial(compiled_step.inductor_step, self._scaled))
        limit, steps = self.room.step_bytes, Steps(self._report, INDUCTOR, 1)
        steps.begin("")
        row = self.room.searched_row(
            INDUCTOR,
            _KEEPS_INDUCTOR,
            step_at,
            lambda: longest(lambda n: self._bytes(step_at(n)), limit, START, tolerance=0),
            lambda n: self.room.parts(step_at(n)).total,
        )
        steps.end()
        return row

    def _inductor_us(self, length: int) -> float:
        """The time of Inductor's step."""
        assert self._scaled is not None, "the rows of lengths come first"
        return compiled_step.inductor_step(self._scaled, length).us

    def _bytes(self, step: compiled_step.CompiledStep) -> int:
        return self.room.without_gaps(step.parts).total

    def _trace(
        self,
        length: int,
        budgets: Sequence[object],
        steps: Steps,
        multiple: int | None = None,
        layers: int | None = None,
        deepen: bool = False,
    ) -> TracedStep:
        """The traced step of the model, or of its first layers; with ``deepen``, one of these is
        repeated until there are as many as the model has."""
        of_layers = f", {layers} layers" if layers else ""
        steps.begin(f"tracing {length:,} tokens{of_layers}")
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
        if not deepen or layers is None:
            return traced
        deep = deepened(traced, layers, layer_count(self.config))
        self._copy = self._copy or deep
        return deep


def _is_near(length: int, traced: TracedStep, near: tuple[float, float]) -> bool:
    return near[0] <= length / traced.length <= near[1]


def _text(memory_budget: object) -> str:
    if isinstance(memory_budget, int):
        return f"{memory_budget >> 20}MiB"
    return str(memory_budget)
