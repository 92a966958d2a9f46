"""Plans `mstpass plan`: what fits on a device, for each way to train.

Eager rows are steps run on fake tensors (eager_step.py). Compiled rows are plans of the traced
joint graph, simulated (compiled_step.py). All rows add the same fixed bytes (fixed_memory.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mstpass.errors import UserError
from mstpass.partition.budget import simulated_limit
from mstpass.partition.solvers import AUTO, SOLVERS
from mstpass.partition.solvers.min_cut import min_cut
from mstpass.planner.allocator_replay import Resident, needed_bytes
from mstpass.planner.compiled_step import CompiledStep
from mstpass.planner.eager_recipes import (
    HEAD_TILES,
    TILE_TOKENS,
    checkpointed,
    minisequence,
    plain,
)
from mstpass.planner.eager_step import EagerStep, Recipe, eager_step
from mstpass.planner.fixed_memory import Sizes, fixed, gradient_bytes, optimizer_temporaries
from mstpass.planner.longest_sequence import GRAIN, longest
from mstpass.planner.models import build, config_of, sizes_of
from mstpass.planner.notes import does_not_fit, notes
from mstpass.planner.request import CACHING, Request
from mstpass.planner.result import (
    CHECKPOINT,
    EAGER,
    INDUCTOR,
    MST,
    RECIPE,
    DoesNotFit,
    Parts,
    Planned,
    Row,
)
from mstpass.planner.traced_step import TracedStep, trace
from mstpass.planner.training import Training
from mstpass.problem.problem import CutProblem, Plan
from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.tracing.devices import traced_for

_KEEPS = {
    EAGER: "keeps what autograd saves",
    CHECKPOINT: "keeps each layer's input; backward recomputes one layer at a time",
    RECIPE: f"keeps each layer's input; MLPs in tiles of {TILE_TOKENS} tokens, head and loss in "
    f"{HEAD_TILES} tiles",
    INDUCTOR: "keeps the fewest bytes from which backward needs no matmul or attention a second "
    "time; kernels are fused",
}
_FREE, _LEAST = "free", 0.0  # values of memory_budget
_START = 4096  # tokens of the first guess
_NEAR = (0.5, 2.0)  # a trace is scaled to lengths between these multiples of its own
_SHRINK = 0.995
_SHORTER = 0.99  # factor of the next length where gaps leave no room
_TRIES = 6
_BUDGET_TRIES = 3

T = TypeVar("T")
Step = EagerStep | CompiledStep


def plan(request: Request, advance: Callable[[str], None] = lambda what: None) -> Planned:
    """Plan a request. ``advance`` is called with a description of each piece of work.

    Raises:
        ModelError: there is no such model.
        DoesNotFit: weights, optimizer states and gradients alone are larger than the device.
        UserError: the model's training step cannot be traced.
    """
    with traced_for(None, request.gpu):
        return _plan(request, advance)


def _plan(request: Request, advance: Callable[[str], None]) -> Planned:
    config = config_of(request.model)
    with FakeTensorMode():
        sizes = _traceable(request, lambda: sizes_of(build(config, request.training)))
    planner = _Planner(request, config, sizes, advance)
    rows = () if request.alone else planner.rows_to_compare()
    own = planner.mst_row(max((row.length for row in rows), default=_START))
    return Planned(request, sizes, planner.fixed, (*rows, own), notes(request, config, own))


class _Planner:
    """Plans the rows of one request.

    Attributes:
        fixed_bytes: bytes of the device that hold no tensor of the step.
        step_bytes: bytes of the device that are left for the tensors of the step.
        at_end: bytes that the step holds while the optimizer runs.
    """

    def __init__(self, request: Request, config: Any, sizes: Sizes, advance: Callable[[str], None]):
        self.request, self.config, self.advance = request, config, advance
        self.training = request.training
        self.fixed = fixed(sizes, self.training)
        self.fixed_bytes = self.fixed.total + request.overhead_bytes
        self.step_bytes = request.device_bytes - self.fixed_bytes
        self.at_end = Parts(
            gradients=gradient_bytes(sizes, self.training),
            temporaries=optimizer_temporaries(sizes, self.training),
        )
        if self.step_bytes <= self.at_end.total:
            raise DoesNotFit(does_not_fit(request, sizes))
        self._allocator_bytes = request.device_bytes - request.overhead_bytes
        self._resident = _resident(sizes, self.training, self.fixed.gathered)
        self._traces: dict[tuple[int, bool], TracedStep] = {}

    def _parts(self, step: Step) -> Parts:
        """Bytes at the peak of the step or of the optimizer, whichever is higher, with gaps."""
        parts = max(step.parts, self.at_end, key=lambda parts: parts.total)
        if self.request.allocator != CACHING:
            return parts
        need = needed_bytes(step.events, self._resident, self._allocator_bytes)
        return dataclasses.replace(parts, gaps=max(0, need - self.fixed.total - parts.total))

    def _longest(self, step_at: Callable[[int], Step], start: int) -> int:
        """The longest sequence that fits.

        Gaps neither grow nor shrink steadily with the length. The search with gaps therefore starts
        at the longest length without gaps. It shortens the length by half of the relative excess,
        but by at least one per cent, until the step fits.
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
        eager, checkpoint, recipe = (self._eager_row(name, way) for name, way in ways)
        inductor = self._inductor_row(recipe.length or _START, checkpoint.length or _START)
        return eager, checkpoint, inductor, recipe

    def _eager_row(self, name: str, recipe: Recipe) -> Row:
        @functools.cache
        def step_at(length: int) -> EagerStep:
            self.advance(f"{name}, {length} tokens")
            return _traceable(
                self.request, lambda: eager_step(self.config, self.training, recipe, length)
            )

        return self._row(name, step_at, _START)

    def _inductor_row(self, traced_length: int, start: int) -> Row:
        """Inductor's row, from mst's trace: without loops, the problem scales to every length."""
        traced = self._traced(traced_length)

        def step_at(length: int) -> CompiledStep:
            self.advance(f"{INDUCTOR}, {length} tokens")
            return _inductor_step(traced, length)

        return self._row(INDUCTOR, step_at, start)

    def _row(self, name: str, step_at: Callable[[int], Step], start: int) -> Row:
        length = self.request.length
        if length is None:
            length = self._longest(step_at, start)
        parts = self._parts(step_at(length)) if length else Parts()
        fits = length > 0 and parts.total <= self.step_bytes
        return Row(name, _KEEPS[name], length, fits, parts, self.fixed_bytes + parts.total)

    # ---- mst's row -----------------------------------------------------------------------------
    def mst_row(self, start: int) -> Row:
        """The fastest plan that fits, at the given length or else at the longest that fits."""
        length = self.request.length
        if length is not None:
            return self._fastest(length)
        length = self._longest_with_mst(start)
        for _ in range(_TRIES):
            row = self._fastest(length)
            if row.fits or length <= 1:
                return row
            length = int(length * min(_SHRINK, self.step_bytes / row.parts.total))
        return row

    def _longest_with_mst(self, start: int) -> int:
        length = start
        for _ in range(_TRIES):
            traced = self._traced(length)

            @functools.cache
            def step_at(length: int, traced: TracedStep = traced) -> CompiledStep:
                self.advance(f"{MST}, {length} tokens")
                problem = traced.problem_at(length, _LEAST)
                return CompiledStep(traced, problem, SOLVERS[AUTO](problem, 0))

            length = self._longest(step_at, traced.length)
            if length == 0 or _NEAR[0] <= length / traced.length <= _NEAR[1]:
                break
        return max(1, length)

    def _fastest(self, length: int) -> Row:
        """The row of the first plan that fits: free, within the step's bytes, of least memory.

        Solvers do not see gaps. The budget of the second plan therefore shrinks by what its step
        takes too much. At the longest length there is no room for a second plan.
        """
        traced = self._traced(length, exact=True)
        inductor_us = _inductor_step(traced, length).us
        room = self.step_bytes
        between = [self.step_bytes] * _BUDGET_TRIES if self.request.length is not None else []
        for option in (_FREE, *between, _LEAST):
            limit = {_FREE: None, _LEAST: 0}.get(option, simulated_limit(room))
            budget = room if limit else option
            self.advance(f"{MST}, {length} tokens, memory_budget={_text(budget)}")
            problem = traced.problem_at(length, option)
            found = SOLVERS[AUTO](problem, limit)
            step = CompiledStep(traced, problem, found)
            parts = self._parts(step)
            allowed = simulated_limit(self.step_bytes) if limit else self.step_bytes
            excess = parts.total - allowed
            if excess <= 0:
                break
            if limit:
                room = max(1, room - excess)
        return Row(
            name=MST,
            keeps=_kept(problem, found),
            length=length,
            fits=parts.total <= self.step_bytes,
            parts=parts,
            total_bytes=self.fixed_bytes + parts.total,
            memory_budget=_text(budget),
            extra_time=step.us / inductor_us - 1,
        )

    def _traced(self, length: int, exact: bool = False) -> TracedStep:
        exact = exact or self.request.length is not None
        if (length, exact) not in self._traces:
            self.advance(f"tracing {length} tokens")
            between = () if self.request.length is None else (self.step_bytes,)
            budgets: tuple[object, ...] = (_FREE, *between, _LEAST)
            self._traces[length, exact] = _traceable(
                self.request, lambda: trace(self.config, self.training, length, budgets, exact)
            )
        return self._traces[length, exact]


def _resident(sizes: Sizes, training: Training, gathered: int) -> Resident:
    weight_shards, state_shards = training.weight_shards, training.state_shards
    return Resident(
        weights=tuple(-(-training.weight_bytes * n // weight_shards) for n in sizes.each),
        states=tuple(int(training.state_bytes * n / state_shards) for n in sizes.each),
        temporaries=tuple(int(training.temporary_bytes * n / state_shards) for n in sizes.each),
        gathered=gathered,
    )


def _inductor_step(traced: TracedStep, length: int) -> CompiledStep:
    """The step without loops, cut as torch's partitioner would."""
    whole = dataclasses.replace(traced.problem_at(length, _FREE), regions=())
    return CompiledStep(traced, whole, Plan(min_cut(whole), {}))


def _kept(problem: CutProblem, found: Plan) -> str:
    modes = [found.modes.get(r.region, r.modes[0].name) for r in problem.regions]
    looped = collections.Counter(mode for mode in modes if mode != "whole")
    loops = ", ".join(f"{count} {mode}" for mode, count in looped.items())
    return f"keeps {len(found.saved)} values; loops: {loops or 'none'}"


def _text(memory_budget: object) -> str:
    if isinstance(memory_budget, int):
        return f"{memory_budget >> 20}MiB"
    return str(memory_budget)


def _traceable(request: Request, make: Callable[[], T]) -> T:
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
