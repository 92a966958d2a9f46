"""The batch, the length and the plan of the most tokens per second that fit (``--search``).

The whole model is traced once, with one sequence, and planned with more and with less
recomputation. Each plan is simulated at every length and every batch, by the scaled problem
(scale_to_length.py). What is named best is then traced and planned itself, for the row of the
table.

Lengths and batches double from one to the next. A longer sequence costs more time for each token,
so that the shortest length is fastest unless it is too short for the device; of each length the
best batch and plan are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mstpass.errors import UserError
from mstpass.memory.allocation import BLOCK
from mstpass.planner.compiled_step import FREE, LEAST, CompiledStep, planned, step_of_plan
from mstpass.planner.longest_sequence import MOST
from mstpass.planner.progress import COMBINATIONS, Report, Steps
from mstpass.planner.request import BATCH, LENGTH, RECOMPUTE, SHORTEST, Request
from mstpass.planner.result import Combination
from mstpass.planner.room import Room, traceable
from mstpass.planner.speed import step_time
from mstpass.planner.traced_step import TracedStep, trace
from mstpass.problem.problem import Plan

_TRACED = 16384  # tokens of a sequence that is traced, at least
_BETWEEN = (0.67, 0.33)  # budgets between the free plan and that of least memory
_FEW = 6  # combinations that are kept


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A plan, and the ``memory_budget`` that leads to one like it."""

    memory_budget: object
    option: object
    plan: Plan


def combinations_of(room: Room, config: Any, report: Report) -> tuple[Combination, ...]:
    """The best batch and plan of each length, the fastest first.

    Args:
        room: of one rank: where ranks share a sequence, its length is a rank's.

    Raises:
        UserError: not even the shortest length fits.
    """
    search = _Search(room, config, Steps(report, COMBINATIONS, 12))
    found = sorted(search.best_of_lengths(), key=lambda each: -each.tokens_per_s)
    search.steps.end()
    if not found:
        raise UserError(
            f"--search {','.join(sorted(room.request.search))}: not even {search.shortest:,} "
            "tokens of one sequence fit on a device: give a shorter --sequence, or more memory"
        )
    return tuple(found[:_FEW])


def with_fastest(request: Request, found: tuple[Combination, ...]) -> Request:
    """The request with the fastest combination."""
    training = dataclasses.replace(request.training, batch=found[0].batch)
    return dataclasses.replace(request, training=training, length=found[0].length)


class _Search:
    def __init__(self, room: Room, config: Any, steps: Steps):
        self.room, self.config, self.steps = room, config, steps
        self.request = room.request
        self.ranks = self.request.training.sequence_ranks
        self.shortest = self.request.length or max(1, SHORTEST // self.ranks)

    def best_of_lengths(self) -> Iterator[Combination]:
        """The fastest combination of each length at which one fits."""
        self.room.check()
        traced = self._trace()
        plans = tuple(self._plans(traced))
        length = self.shortest
        while length <= MOST:
            self.steps.begin(f"{length:,} tokens")
            found = [each for plan in plans for each in self._of_length(traced, plan, length)]
            if not found:
                break
            yield max(found, key=lambda each: each.tokens_per_s)
            if LENGTH not in self.request.search:
                break
            length *= 2

    def _trace(self) -> TracedStep:
        length = max(self.shortest, _TRACED // self.ranks)
        training = dataclasses.replace(self.request.training, batch=1)
        self.steps.begin(f"tracing {length:,} tokens")
        with traceable(self.request):
            return trace(
                self.config, training, length, (FREE, LEAST), BLOCK, None, self.request.host_bytes
            )

    def _plans(self, traced: TracedStep) -> Iterator[_Plan]:
        """Plans of the traced step with more and more recomputation."""
        self.steps.begin("memory_budget=free")
        free = planned(traced, traced.length, FREE, None)
        yield _Plan(FREE, FREE, free.plan)
        if RECOMPUTE not in self.request.search:
            return
        self.steps.begin("memory_budget=0.0")
        least = planned(traced, traced.length, LEAST, 0)
        for share in _BETWEEN:
            self.steps.begin(f"memory_budget={share}")
            limit = least.peak_bytes + share * (free.peak_bytes - least.peak_bytes)
            yield _Plan(share, LEAST, planned(traced, traced.length, LEAST, int(limit)).plan)
        yield _Plan(LEAST, LEAST, least.plan)

    def _of_length(self, traced: TracedStep, plan: _Plan, length: int) -> Iterator[Combination]:
        """A plan's combinations that fit, with larger and larger batches."""
        searched = BATCH in self.request.search
        batch = 1 if searched else self.request.training.batch
        while batch * length <= MOST:
            step = step_of_plan(traced, length, plan.option, plan.plan, batch)
            total_bytes = self.room.parts(step).total
            if total_bytes > self.room.step_bytes:
                return
            yield self._combination(plan, step, batch, length, total_bytes)
            if not searched:
                return
            batch *= 2

    def _combination(
        self, plan: _Plan, step: CompiledStep, batch: int, length: int, step_bytes: int
    ) -> Combination:
        training = dataclasses.replace(self.request.training, batch=batch)
        time = step_time(step.us, step.exchange_us, self.room.sizes, training)
        whole = self.ranks * length
        return Combination(
            batch,
            whole,
            str(plan.memory_budget),
            self.room.fixed_bytes + step_bytes,
            time,
            time.tokens_per_s(training, whole),
        )
