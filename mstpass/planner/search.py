"""The batch, the length and the plan of the most tokens per second that fit (``--search``).

The whole model is traced once, with one sequence, and planned with more and with less
recomputation. Each plan is simulated at every length and every batch, by the scaled problem
(scale_to_length.py). What is named best is then traced and planned itself, for the row of the
table.

Lengths and batches double from one to the next. A longer sequence costs more time for each token,
so that the shortest length is fastest unless it is too short for the device; of each length the
best batch and plan are kept.

The time of a training step by the cost model: computation, communication, the optimizer.

Forward and backward are those of the traced step, the exchanges of attention among them. What
sharding exchanges is not in the traced graph. With weights of W bytes and gradients of G bytes::

    none, one device    nothing
    none                all-reduce G
    zero1               reduce-scatter G, all-gather W
    zero2               reduce-scatter G, all-gather W
    zero3               all-gather W in forward and in backward, reduce-scatter G
    replicas of shards  all-reduce the shard of G between them

The optimizer reads and writes weights and states, and reads gradients. Nothing overlaps here:
prefetching hides a part of the communication, so that a step takes less time.

The best way to divide devices among data, shards and sequences, and heads into groups.

R devices share each sequence, so that of N devices N / R groups have sequences of their own. The
weights are sharded over all N, or over those of a node, of which each node then has a replica.

    no length is given   the longest sequence wins: estimated by shallow copies for each R
    a length is given    the most tokens per second that fit win: planned in full for each R

Where ranks exchange heads, they may do so in groups, which takes time and less memory. So of a
given length more groups are tried only where fewer do not fit.

Shards in each node alone exchange less between nodes and hold more. They are tried where a length
is given, with the R that has won.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from mstpass.errors import UserError
from mstpass.graph.call_work import ExchangeWork
from mstpass.graph.device_costs import Costs, costs_of, kind_of_gpu
from mstpass.memory.allocation import BLOCK
from mstpass.planner.compiled_rows import CompiledRows
from mstpass.planner.compiled_step import FREE, LEAST, CompiledStep, planned, step_of_plan
from mstpass.planner.lengths import MOST
from mstpass.planner.request import (
    BATCH,
    GROUPS,
    LENGTH,
    RECOMPUTE,
    SHORTEST,
    Combination,
    DoesNotFit,
    Report,
    Request,
    Row,
    Split,
    StepTime,
    silent,
)
from mstpass.planner.room import Room, traceable
from mstpass.planner.traced_step import SequenceError, TracedStep, trace
from mstpass.planner.training import Sizes, Training
from mstpass.problem.problem import Plan

DEVICE = torch.device("cuda", 0)


def step_time(us: float, exchange_us: float, sizes: Sizes, training: Training) -> StepTime:
    """The time of a step.

    Args:
        us: forward and backward with the exchanges of attention, which take ``exchange_us``.
    """
    costs = costs_of(DEVICE)
    return StepTime(
        us - exchange_us,
        exchange_us,
        _sharding_us(costs, sizes, training),
        _optimizer_us(costs, sizes, training),
    )


def _sharding_us(costs: Costs, sizes: Sizes, training: Training) -> float:
    weights, gradients = sizes.weight_bytes(training), sizes.gradient_bytes(training)
    if training.sharding == "none":
        return _exchanged_us(costs, 2 * gradients, training.gpus)
    gathered = 2 if training.sharding == "zero3" else 1
    us = _exchanged_us(costs, gathered * weights + gradients, training.ranks)
    if training.replicas > 1:  # in other nodes
        share = 2 * (training.replicas - 1) / training.replicas
        us += costs.exchange_us(ExchangeWork(share * gradients / training.ranks, training.gpus))
    return us


def _exchanged_us(costs: Costs, size: int, ranks: int) -> float:
    """Each rank sends all but its own share of so many bytes."""
    if ranks == 1 or not size:
        return 0.0
    return costs.exchange_us(ExchangeWork(size * (ranks - 1) / ranks, ranks))


def _optimizer_us(costs: Costs, sizes: Sizes, training: Training) -> float:
    states = training.state_bytes * sizes.parameters
    updated = training.weight_bytes * sizes.parameters
    moved = (2 * states + 3 * updated) / training.state_shards
    return costs.other_us(0.0, moved)


# ---- splits --------------------------------------------------------------------------------------
Planned = tuple[CompiledRows, Row]


class BestSplit:
    """Compares the splits of a request's devices and heads, when it is made.

    Attributes:
        splits: all that were compared.
        request: the request with the best one.
        planned: mst's row of the best one, where it was needed to compare them.

    Raises:
        SequenceError: no number of ranks can share the model's sequences.
        DoesNotFit: weights, optimizer states and gradients alone are larger than a device.
    """

    def __init__(self, request: Request, sizes: Sizes, config: Any, report: Report):
        self._request, self._sizes, self._config, self._report = request, sizes, config, report
        self._refused: list[SequenceError] = []
        self._planned: dict[Split, Planned] = {}
        training = request.training
        counts = [n for n in range(1, training.gpus + 1) if training.gpus % n == 0]
        counts = counts if request.split else [training.sequence_ranks]
        found: list[Split] = []
        for count in counts:
            report(f"{count} ranks a sequence")
            found += self._of_ranks(count)
        if self._refused and len(self._refused) == len([n for n in counts if n > 1]):
            raise self._refused[-1]
        best = max(found, key=_goodness)
        of_node = kind_of_gpu(DEVICE).links.gpus
        is_sharded = training.sharding != "none" and training.gpus % of_node == 0
        replicas = training.gpus // of_node if is_sharded else 1
        if request.split and request.length and replicas > 1:
            found += self._tried(
                dataclasses.replace(best.training, ranks=of_node, replicas=replicas)
            )
            best = max(found, key=_goodness)
        self.splits = tuple(found)
        self.request = dataclasses.replace(request, training=best.training)
        self.planned = self._planned.get(best)

    def _of_ranks(self, count: int) -> list[Split]:
        """So many ranks a sequence, with more and more groups of heads; nothing if none can."""
        training = dataclasses.replace(self._request.training, sequence_ranks=count)
        chosen = self._request.groups and count > 1
        found: list[Split] = []
        for groups in GROUPS if chosen else (training.head_groups,):
            try:
                found += self._tried(dataclasses.replace(training, head_groups=groups))
            except SequenceError as error:
                if not found:
                    self._refused.append(error)
                break
            if self._request.length and any(split.fits for split in found):
                break
        return found

    def _tried(self, training: Training) -> list[Split]:
        """What a split leads to; nothing where it has no room for any activation.

        Raises:
            SequenceError: the ranks cannot share the model's sequences.
        """
        request = dataclasses.replace(self._request, training=training)
        room, ranks = Room(request.of_rank, self._sizes), training.sequence_ranks
        try:
            room.check()
            compiled = CompiledRows(room, self._config, silent)
            if request.length is None:
                length = ranks * compiled.about_longest()
                return [Split(training, length, length > 0)]
            row = compiled.mst_row()
        except DoesNotFit:
            if training.ranks == self._request.training.ranks:
                raise  # no other one fits: it has as many shards, or fewer
            return []
        time = step_time(row.us, row.exchange_us, self._sizes, training)
        split = Split(training, request.length, row.fits, time)
        self._planned[split] = compiled, row
        return [split]


def _goodness(split: Split) -> tuple[bool, float, int, int]:
    training = split.training
    time = split.time
    good = split.length if time is None else time.tokens_per_s(training, split.length)
    return split.fits, good, -training.sequence_ranks, -training.head_groups


# ---- search --------------------------------------------------------------------------------------
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
    search = _Search(room, config, report)
    found = sorted(search.best_of_lengths(), key=lambda each: -each.tokens_per_s)
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
    def __init__(self, room: Room, config: Any, report: Report):
        self.room, self.config, self.report = room, config, report
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
            self.report(f"{length:,} tokens")
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
        self.report(f"tracing {length:,} tokens")
        with traceable(self.request):
            return trace(
                self.config, training, length, (FREE, LEAST), BLOCK, None, self.request.host_bytes
            )

    def _plans(self, traced: TracedStep) -> Iterator[_Plan]:
        """Plans of the traced step with more and more recomputation."""
        self.report("memory_budget=free")
        free = planned(traced, traced.length, FREE, None)
        yield _Plan(FREE, FREE, free.plan)
        if RECOMPUTE not in self.request.search:
            return
        self.report("memory_budget=0.0")
        least = planned(traced, traced.length, LEAST, 0)
        for share in _BETWEEN:
            self.report(f"memory_budget={share}")
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
