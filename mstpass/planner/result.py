"""The output of `mstpass plan`: for each way to train, its length and its memory."""

from __future__ import annotations

import dataclasses

from mstpass.errors import UserError
from mstpass.gpus import Links
from mstpass.planner.fixed_memory import Fixed, Sizes
from mstpass.planner.request import Request
from mstpass.planner.training import Training

EAGER, CHECKPOINT, INDUCTOR = "eager", "checkpoint per layer", "Inductor"
RECIPE, MST = "MST recipe", "mst"


class DoesNotFit(UserError):
    """Weights, optimizer states and gradients alone are larger than the device."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Bytes that a step holds at its peak, besides the fixed ones.

    Attributes:
        gradients: gradients of parameters.
        saved: values that the forward saves for the backward.
        logits: tensors of tokens x vocabulary, whether saved or not.
        loops: one chunk of the loop that runs at the peak.
        other: other activations, their gradients, recomputed values, and workspaces of kernels.
        temporaries: values that exist while the optimizer's step runs.
        gaps: bytes that the allocator holds between tensors.
    """

    gradients: int = 0
    saved: int = 0
    logits: int = 0
    loops: int = 0
    other: int = 0
    temporaries: int = 0
    gaps: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Point:
    """A sequence length in tokens, and the bytes of a device on which a step of it fits."""

    length: int
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, at one sequence length.

    Attributes:
        name: one of the names above, such as ``EAGER``.
        keeps: in words, what this way keeps for its backward.
        length: tokens of a sequence; 0 where no length fits.
        total_bytes: bytes of the device at the peak, overhead included.
        memory_budget: mst's row only: the value of the option to compile with.
        extra_time: mst's row only: time beyond Inductor's step, as a fraction of that step, by the
            cost model for GPUs.
        host_bytes: pinned host memory in which saved values wait.
        us: mst's row only: the microseconds of forward and backward, by the cost model.
        exchange_us: the part of it in which ranks that share a sequence exchange.
        curve: what other lengths take, the shortest first; empty unless the request asks for it.
        narrow: mst's row only: calls whose kernels go wrong on tensors so large.
    """

    name: str
    keeps: str
    length: int
    fits: bool
    parts: Parts
    total_bytes: int
    memory_budget: str = ""
    extra_time: float | None = None
    host_bytes: int = 0
    us: float = 0.0
    exchange_us: float = 0.0
    curve: tuple[Point, ...] = ()
    narrow: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The microseconds of a step on each device.

    Attributes:
        compute_us: forward and backward, without exchanges.
        exchange_us: of ranks that share a sequence.
        sharding_us: of weights and gradients.
        optimizer_us: of the optimizer's step.
    """

    compute_us: float
    exchange_us: float = 0.0
    sharding_us: float = 0.0
    optimizer_us: float = 0.0

    @property
    def total_us(self) -> float:
        return self.compute_us + self.communication_us + self.optimizer_us

    @property
    def communication_us(self) -> float:
        return self.exchange_us + self.sharding_us

    @property
    def communication(self) -> float:
        """The share of the time that is communication."""
        return self.communication_us / self.total_us

    def tokens_per_s(self, training: Training, length: int) -> float:
        """Of all devices together; ``length`` is that of a sequence."""
        return 1e6 * training.data_ranks * training.batch * length / self.total_us


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to divide devices among data, shards and sequences.

    Attributes:
        training: has the numbers of ranks.
        length: tokens of a sequence: the given ones, or about as many as fit.
        time: of a step, where the length is given.
    """

    training: Training
    length: int
    fits: bool
    time: StepTime | None = None


@dataclasses.dataclass(frozen=True)
class Combination:
    """One batch, length and plan that fit.

    Attributes:
        length: tokens of a sequence.
        memory_budget: of the plan.
        total_bytes: bytes of the device at the peak, overhead included.
    """

    batch: int
    length: int
    memory_budget: str
    total_bytes: int
    time: StepTime
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """All rows of a plan; mst's row is the last.

    Attributes:
        time: of a step of mst's row.
        links: of the devices, by which communication is estimated.
        splits: the ways to divide the devices that were compared, if the request asks for the best.
        combinations: the best batch and plan of each length, the fastest first, if the request
            asks for a search.
    """

    request: Request
    sizes: Sizes
    fixed: Fixed
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    time: StepTime | None = None
    links: Links | None = None
    splits: tuple[Split, ...] = ()
    combinations: tuple[Combination, ...] = ()

    @property
    def own(self) -> Row:
        return self.rows[-1]
