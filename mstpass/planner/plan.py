"""What fits on a device: each way to train, by one accounting.

Eager rows are steps run on fake tensors (eager_step.py). Compiled rows are plans of the traced
joint graph, simulated (compiled_step.py). All add the same fixed bytes (accounting.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mstpass.errors import UserError
from mstpass.partition.budget import SPARE
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.planner.accounting import Parts, Sizes, Training, fixed
from mstpass.planner.allocator_replay import Resident, needed_bytes
from mstpass.planner.compiled_step import CompiledStep, Traced, trace
from mstpass.planner.data import (
    CACHING,
    CHECKPOINT,
    EAGER,
    FREE,
    INDUCTOR,
    LEAST,
    MST,
    RECIPE,
    DoesNotFit,
    Planned,
    Request,
    Row,
)
from mstpass.planner.eager_recipes import (
    HEAD_TILES,
    TILE_TOKENS,
    checkpointed,
    minisequence,
    plain,
)
from mstpass.planner.eager_step import EagerStep, Recipe, eager_step
from mstpass.planner.longest_sequence import GRAIN, longest
from mstpass.planner.models import build, config_of, sizes_of
from mstpass.planner.notes import held_gradients, notes, step_temporaries, too_large
from mstpass.problem.problem import CutProblem, Plan
from mstpass.torch_internals.fake_tensors import FakeTensorMode

_KEEPS = {
    EAGER: "keeps what autograd saves",
    CHECKPOINT: "keeps each layer's input; backward recomputes one layer at a time",
    RECIPE: f"keeps each layer's input; MLPs in tiles of {TILE_TOKENS} tokens, head and loss in "
    f"{HEAD_TILES} tiles",
    INDUCTOR: "keeps the least bytes that need no matmul or attention again; fused",
}
_START = 4096  # tokens of a first guess
_NEAR = (0.5, 16.0)  # times the traced length: beyond, it is traced anew
_SHRINK = 0.995
_SHORTER = 0.99  # where gaps leave no room
_TRIES = 6
_AGAIN = 3

T = TypeVar("T")
Step = EagerStep | CompiledStep


def plan(request: Request, advance: Callable[[str], None] = lambda what: None) -> Planned:
    """Plan a request; ``advance`` hears what is done next.

    Raises:
        ModelError: there is no such model.
        DoesNotFit: weights, states and gradients alone are too large.
        UserError: the model's step cannot be traced.
    """
    config = config_of(request.model)
    with FakeTensorMode():
        sizes = _guarded(request, lambda: sizes_of(build(config, request.training)))
    planner = _Planner(request, config, sizes, advance)
    rows = () if request.alone else planner.rows_to_compare()
    own = planner.own(max((row.length for row in rows), default=_START))
    return Planned(request, sizes, planner.fixed, (*rows, own), notes(request, config, own))


class _Planner:
    def __init__(self, request: Request, config: Any, sizes: Sizes, advance: Callable[[str], None]):
        self.request, self.config, self.advance = request, config, advance
        self.training = request.training
        self.fixed = fixed(sizes, self.training)
        self.around = self.fixed.total + request.overhead_bytes
        self.step_bytes = request.device_bytes - self.around
        at_end = held_gradients(sizes, self.training), step_temporaries(sizes, self.training)
        if self.step_bytes <= sum(at_end):
            raise DoesNotFit(too_large(request, sizes))
        self.at_end = Parts(gradients=at_end[0], temporaries=at_end[1])
        self.room = request.device_bytes - request.overhead_bytes
        self.resident = _resident(sizes, self.training, self.fixed.gathered)
        self.traces: dict[tuple[int, bool], Traced] = {}

    def _parts(self, step: Step) -> Parts:
        """At the step's peak or, where that is higher, at the optimizer's; with gaps."""
        parts = max(step.parts, self.at_end, key=lambda parts: parts.total)
        if self.request.allocator != CACHING:
            return parts
        need = needed_bytes(step.events, self.resident, self.room) - self.fixed.total
        return dataclasses.replace(parts, gaps=max(0, need - parts.total))

    def _longest(self, step_at: Callable[[int], Step], start: int) -> int:
        """The longest sequence that fits.

        Gaps neither grow nor shrink steadily with the length: from the longest one without them it
        goes down, by half of what is too much but at least by a per cent, to the first that runs.
        """
        length = longest(lambda n: step_at(n).parts.total, self.step_bytes, start)
        while length > GRAIN and self.request.allocator == CACHING:
            total = self._parts(step_at(length)).total
            if total <= self.step_bytes:
                break
            halved = (1 + self.step_bytes / total) / 2
            length = max(GRAIN, int(min(_SHORTER, halved) * length) // GRAIN * GRAIN)
        return length

    # ---- rows to compare with ------------------------------------------------------------------
    def rows_to_compare(self) -> tuple[Row, ...]:
        loss: dict[str, Any] = {"logits": self.request.logits, "outputs": self.request.outputs}
        ways: tuple[tuple[str, Recipe], ...] = (
            (EAGER, functools.partial(plain, **loss)),
            (CHECKPOINT, functools.partial(checkpointed, **loss)),
            (RECIPE, minisequence),
        )
        eager, checkpoint, recipe = (self._eager(name, way) for name, way in ways)
        inductor = self._inductor(recipe.length or _START, checkpoint.length or _START)
        return eager, checkpoint, inductor, recipe

    def _eager(self, name: str, recipe: Recipe) -> Row:
        @functools.cache
        def step_at(length: int) -> EagerStep:
            self.advance(f"{name}, {length} tokens")
            return _guarded(
                self.request, lambda: eager_step(self.config, self.training, recipe, length)
            )

        return self._row(name, _KEEPS[name], step_at, _START)

    def _inductor(self, traced_length: int, start: int) -> Row:
        """From mst's trace: without loops the problem of every length follows from it."""
        traced = self._traced(traced_length)

        def step_at(length: int) -> CompiledStep:
            self.advance(f"{INDUCTOR}, {length} tokens")
            return _whole_step(traced, length)

        return self._row(INDUCTOR, _KEEPS[INDUCTOR], step_at, start)

    def _row(self, name: str, keeps: str, step_at: Callable[[int], Step], start: int) -> Row:
        length = self.request.length
        if length is None:
            length = self._longest(step_at, start)
        parts = self._parts(step_at(length)) if length else Parts()
        fits = length > 0 and parts.total <= self.step_bytes
        return Row(name, keeps, length, fits, parts, self.around + parts.total)

    # ---- mst -----------------------------------------------------------------------------------
    def own(self, start: int) -> Row:
        """The cheapest plan that fits, at the given length or the longest one."""
        length = self.request.length
        if length is not None:
            return self._cheapest(length)
        length = self._longest_own(start)
        for _ in range(_TRIES):
            row = self._cheapest(length)
            if row.fits or length <= 1:
                return row
            length = int(length * min(_SHRINK, self.step_bytes / row.parts.total))
        return row

    def _longest_own(self, start: int) -> int:
        length = start
        for _ in range(_TRIES):
            traced = self._traced(length)

            @functools.cache
            def step_at(length: int, traced: Traced = traced) -> CompiledStep:
                self.advance(f"{MST}, {length} tokens")
                problem = traced.at(length, LEAST)
                return CompiledStep(traced, problem, SOLVERS[AUTO](problem, 0), length)

            length = self._longest(step_at, traced.length)
            if length == 0 or _NEAR[0] <= length / traced.length <= _NEAR[1]:
                break
        return max(1, length)

    def _cheapest(self, length: int) -> Row:
        """The first that fits of: the free plan, one within the room there is, the least one.

        At the longest length there is no room between.
        """
        traced = self._traced(length, exact=True)
        inductor_us = _whole_step(traced, length).us
        room = self.step_bytes
        between = [self.step_bytes] * _AGAIN if self.request.length is not None else []
        for option in (FREE, *between, LEAST):
            limit = {FREE: None, LEAST: 0}.get(option, int(room / SPARE))
            budget = room if limit else option
            self.advance(f"{MST}, {length} tokens, memory_budget={_text(budget)}")
            problem = traced.at(length, option)
            found = SOLVERS[AUTO](problem, limit)
            step = CompiledStep(traced, problem, found, length)
            parts = self._parts(step)
            excess = parts.total - (int(self.step_bytes / SPARE) if limit else self.step_bytes)
            if excess <= 0:
                break
            if limit:  # workspaces and gaps, which the solver does not see
                room = max(1, room - excess)
        fits, total = parts.total <= self.step_bytes, self.around + parts.total
        time, keeps = step.us / inductor_us - 1, _kept(problem, found)
        return Row(MST, keeps, length, fits, parts, total, _text(budget), time)

    def _traced(self, length: int, exact: bool = False) -> Traced:
        exact = exact or self.request.length is not None
        if (length, exact) not in self.traces:
            self.advance(f"tracing {length} tokens")
            between = () if self.request.length is None else (self.step_bytes,)
            budgets: tuple[object, ...] = (FREE, *between, LEAST)
            self.traces[length, exact] = _guarded(
                self.request, lambda: trace(self.config, self.training, length, budgets, exact)
            )
        return self.traces[length, exact]


def _resident(sizes: Sizes, training: Training, gathered: int) -> Resident:
    states_on = training.states_on
    return Resident(
        weights=tuple(-(-training.weight_bytes * n // training.weights_on) for n in sizes.each),
        states=tuple(int(training.state_bytes * n / states_on) for n in sizes.each),
        temporaries=tuple(int(training.temporary_bytes * n / states_on) for n in sizes.each),
        gathered=gathered,
    )


def _whole_step(traced: Traced, length: int) -> CompiledStep:
    """Without loops, cut as torch's partitioner would."""
    whole = dataclasses.replace(traced.at(length, FREE), regions=())
    return CompiledStep(traced, whole, Plan(min_cut(whole), {}), length)


def _kept(problem: CutProblem, found: Plan) -> str:
    names = [found.modes.get(r.region, r.modes[0].name) for r in problem.regions]
    looped = collections.Counter(name for name in names if name != "whole")
    loops = ", ".join(f"{count} {name}" for name, count in looped.items())
    return f"keeps {len(found.saved)} values; loops: {loops or 'none'}"


def _text(memory_budget: object) -> str:
    if isinstance(memory_budget, int):
        return f"{memory_budget >> 20}MiB"
    return str(memory_budget)


def _guarded(request: Request, make: Callable[[], T]) -> T:
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # whatever a model's code raises
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--model {request.model}: its training step cannot be traced: "
            f"{type(error).__name__}: {reason}"
        ) from error
