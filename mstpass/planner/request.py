"""The input of `mstpass plan`: a model, how it is trained, and a device.

The output of `mstpass plan`: for each way to train, its length and its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mstpass.errors import UserError
from mstpass.gpus import Links
from mstpass.planner.training import Fixed, Sizes, Training

OVERHEAD = "1.25GiB"  # CUDA's context, and what an "80 GiB" card lacks of 80 GiB
BATCH, LENGTH, RECOMPUTE = "batch", "length", "recompute"
SEARCHED = (BATCH, LENGTH, RECOMPUTE)
GROUPS = (1, 2, 4)  # of heads, which are compared
SHORTEST = 2048  # tokens of a sequence that is searched, where none are given
CHOICES = {  # of attributes of `Request`; those of the eager rows are explained in eager_rows
    "logits": ("model", "fp32", "chunked"),
    "outputs": ("held", "dropped"),
    "mlp_tiles": ("kept", "again"),
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A model, how it is trained, and the device.

    Attributes:
        model: a shipped name, or the path of a ``config.json``.
        device_bytes: memory of the device.
        overhead_bytes: part of the device's memory that tensors cannot use.
        length: sequence length in tokens, on all ranks that share it; None: find the longest that
            fits.
        logits: how the eager rows compute their loss.
        outputs: whether the training loop of the eager rows holds the model's
            outputs until the backward is over.
        mlp_tiles: what the MST recipe's backward holds of an MLP.
        alone: plan mst's row only, without rows to compare with.
        host_bytes: pinned host memory in which saved values of mst's row may wait, and inputs of
            layers that eager rows checkpoint.
        gpu: the kind of GPU, by a name of ``mstpass.gpus``, whose speed decides chunk lengths and
            times; None: this machine's, or else an H100.
        split: find the best number of ranks that share a sequence; ``training`` has all ranks.
        groups: find the best number of groups of heads of ranks that share a sequence.
        search: which of ``SEARCHED`` to choose, by the most tokens per second; a length that is
            given is then the shortest.
        curves: also find what other lengths take, up to twice the device's memory (lengths.py).
    """

    model: str
    training: Training
    device_bytes: int
    overhead_bytes: int
    length: int | None = None
    logits: str = "model"
    outputs: str = "held"
    mlp_tiles: str = "kept"
    alone: bool = False
    gpu: str | None = None
    host_bytes: int = 0
    split: bool = False
    groups: bool = False
    search: frozenset[str] = frozenset()
    curves: bool = False

    @property
    def compares_eager(self) -> bool:
        """Whether eager steps are rows to compare with."""
        return not self.alone

    @property
    def compares_splits(self) -> bool:
        """Whether several ways to divide devices or heads are compared."""
        return self.split or self.groups

    @property
    def traced_device(self) -> str | None:
        """The device that steps are traced for; None: that of their tensors.

        Where ranks share a sequence, the graph has ops of a GPU alone.
        """
        return "cuda" if self.split or self.training.shares else None

    @property
    def of_rank(self) -> Request:
        """The request with the length that a rank has of each sequence."""
        if self.length is None:
            return self
        return dataclasses.replace(self, length=-(-self.length // self.training.sequence_ranks))


# ---- result --------------------------------------------------------------------------------------
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
    """

    gradients: int = 0
    saved: int = 0
    logits: int = 0
    loops: int = 0
    other: int = 0
    temporaries: int = 0

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


# ---- progress ------------------------------------------------------------------------------------
Report = Callable[[str], None]  # gets what is done next


def silent(what: str) -> None:
    """A report that nobody reads."""


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
