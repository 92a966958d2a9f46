"""The time of a training step by the cost model: computation, communication, the optimizer.

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
"""

from __future__ import annotations

import torch

from mstpass.graph.device_costs import Costs, costs_of
from mstpass.graph.exchange_work import ExchangeWork
from mstpass.planner.fixed_memory import Sizes
from mstpass.planner.result import StepTime
from mstpass.planner.training import Training

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
