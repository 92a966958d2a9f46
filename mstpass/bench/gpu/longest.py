"""Part `longest`: the longest sequence of a model within a limit of memory, by way to train.

The limit holds for the allocator of the process (``set_per_process_memory_fraction``), so that a
card stands for a smaller one. A length fits if two steps, forward and backward, run within it. The
first row is what `mstpass plan` predicts; the search of each other row starts there. Each length is
tried in a process of its own.

The search for the longest sequence that fits, from what has been tried so far.

The search keeps no state of its own: it goes on wherever the tried lengths end. The first length is
the predicted one. The memory of a step is affine in the length over long stretches, so a next
length is where a line through what fitted meets the limit; where that fails, the interval between
the longest that fits and the shortest that does not is halved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.bench.comparison import error_text, own_code
from mstpass.bench.gpu import llama
from mstpass.bench.gpu.device import clocks
from mstpass.bench.gpu.job import Job, outcome
from mstpass.bench.gpu.side_by_side import explained, is_out_of_memory
from mstpass.bench.gpu.state import DRY, FAILED, MEASURED, SKIPPED, Case, Outcome, Settings
from mstpass.errors import MissingPackageError
from mstpass.planner.lengths import crossing, rounded
from mstpass.planner.plan import plan
from mstpass.planner.request import CHECKPOINT, EAGER, INDUCTOR, MST, RECIPE, Request

GRAIN = 256  # lengths are multiples of it
TOLERANCE = 0.03  # a sequence that is longer by this fraction might still fit
_MARGIN = 0.99  # a guess stays below the line by this factor: a length that fits says more
_LEAP = 4.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """One length that was tried.

    Attributes:
        peak_bytes: the highest number of allocated bytes; None where it did not fit.
        seconds: the time of a step.
        why: why it did not fit.
    """

    length: int
    fits: bool
    peak_bytes: int | None = None
    seconds: float | None = None
    why: str = ""

    def to_data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def best(probes: Sequence[Probe]) -> Probe | None:
    """The longest that fits."""
    return max((p for p in probes if p.fits), key=lambda p: p.length, default=None)


def next_length(
    probes: Sequence[Probe], start: int, limit_bytes: int, fixed_bytes: int, most: int
) -> int | None:
    """The length to try next; None if the longest that fits is known to within ``TOLERANCE``.

    Args:
        start: the length to try first.
        fixed_bytes: what the step holds at any length, such as the weights.
        most: no longer sequence is tried.
    """
    most = _rounded(most)
    if not probes:
        return min(_rounded(start), most)
    longest = best(probes)
    too_long = min((p.length for p in probes if not p.fits), default=most + GRAIN)
    if longest is None:
        return _rounded(too_long / _LEAP) if too_long > GRAIN else None
    if too_long - longest.length <= max(GRAIN, TOLERANCE * longest.length):
        return None
    points = {0: fixed_bytes, **{p.length: p.peak_bytes or 0 for p in probes if p.fits}}
    aim = crossing(points, limit_bytes, longest.length) * _MARGIN
    aim = min(aim, longest.length * _LEAP)
    if aim - longest.length < TOLERANCE * longest.length:
        aim = longest.length * (1 + TOLERANCE)  # nearly the longest: confirm it
    if too_long <= most and aim >= too_long:
        aim = (longest.length + too_long) / 2
    return min(max(_rounded(aim), longest.length + GRAIN), too_long - GRAIN)


def _rounded(length: float) -> int:
    return rounded(length, GRAIN)


# ---- the part ------------------------------------------------------------------------------------
NAME = "longest"
PREDICTION = "mstpass plan"
WAYS = {  # row -> how the model's code runs
    MST: llama.PLAIN,
    INDUCTOR: llama.PLAIN,
    RECIPE: llama.TILED,
    CHECKPOINT: llama.CHECKPOINTED,
    EAGER: llama.PLAIN,
}
QUICK_BYTES = 2**30
_START = 4096  # tokens, where nothing is predicted
_OPTIONS: dict[str, Any] = {"memory_budget": 0.0, "strict": True}
_LIMIT_S = 240.0  # of the prediction, and of one length


def cases(settings: Settings) -> list[Case]:
    limit = f"{_limit_bytes(settings) / 2**30:.4g} GiB"
    return [Case(NAME, limit, (PREDICTION, *WAYS), _LIMIT_S)]


def work(job: Job) -> Mapping[str, Any]:
    if job.row == PREDICTION:
        return _predict(job)
    return _tried(job) if job.device.runs else _dry_search(job)


def next_probe(
    settings: Settings,
    row: str,
    known: Mapping[str, Outcome],
    probes: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any]:
    """The length to try next; the outcome, if the longest that fits is known."""
    if row == PREDICTION or settings.dry:
        return {}
    size, tried = llama.shape(settings.quick), [Probe(**probe) for probe in probes]
    predicted = _predicted(known, row)
    fixed_bytes = 2 * llama.DTYPE.itemsize * size.parameters  # weights and gradients
    limit = _limit_bytes(settings)
    length = next_length(tried, predicted or _START, limit, fixed_bytes, size.length)
    if length is not None:
        return {"length": length}
    found = best(tried)
    if found is None:
        return outcome(FAILED, f"not even {GRAIN} tokens fit", predicted=predicted)
    return outcome(
        MEASURED,
        length=found.length,
        peak_bytes=found.peak_bytes,
        median_s=found.seconds,
        predicted=predicted,
        tried=[probe.length for probe in tried],
        clocks=clocks(),
    )


def _predicted(known: Mapping[str, Outcome], row: str) -> int | None:
    lengths: Mapping[str, int] = known.get(PREDICTION, {}).get("lengths") or {}
    return lengths.get(row)


def _limit_bytes(settings: Settings) -> int:
    return QUICK_BYTES if settings.quick else settings.memory_bytes


# ---- the prediction ----------------------------------------------------------------------------
def _predict(job: Job) -> Outcome:
    """Plan the model for a device of the limit's size: the longest length of each way."""
    size, limit = llama.shape(job.settings.quick), _limit_bytes(job.settings)
    try:
        with llama.config_path(size) as path:
            planned = plan(Request(path, llama.TRAINING, limit, overhead_bytes=0))
    except MissingPackageError as error:
        return outcome(SKIPPED, str(error))
    except Exception as error:
        return outcome(FAILED, error_text(error))
    return outcome(
        MEASURED if job.device.runs else DRY,
        lengths={row.name: row.length for row in planned.rows},
        memory_budget=planned.own.memory_budget,
        extra_time=planned.own.extra_time,
    )


# ---- the search --------------------------------------------------------------------------------
def _tried(job: Job) -> Mapping[str, Any]:
    """Whether a length fits; an outcome, if it fails otherwise."""
    length = job.probe["length"]
    job.device.limit_memory(_limit_bytes(job.settings))
    try:
        return _Steps(job).run(length).to_data()
    except Exception as error:
        if is_out_of_memory(error):
            return Probe(length, False, why="out of memory").to_data()
        return outcome(FAILED, f"{length} tokens: {error_text(error)}")


class _Steps:
    """Steps of one way to train, at any length."""

    def __init__(self, job: Job):
        self._device, self._row = job.device, job.row
        self._size = llama.shape(job.settings.quick)
        with job.device.tensors():
            self._model, self._loss_of = self._made_on(job.device.torch_device)

    def _made_on(self, device: torch.device) -> tuple[nn.Module, llama.LossOf]:
        model, loss_of = llama.model_and_loss(self._size, device, WAYS[self._row])
        if self._row in (EAGER, CHECKPOINT):  # whose loops hold the outputs
            return model, loss_of
        return model, llama.LossAlone(model, loss_of)

    def run(self, length: int) -> Probe:
        """Run two steps; the second one is measured."""
        step = self.step(length)
        step()
        seconds: list[float] = []
        peak = self._device.highest_bytes(lambda: seconds.append(self._device.seconds(step)))
        return Probe(length, True, peak, seconds[0])

    def trace(self, length: int) -> None:
        """Plan mst's step; run any other on tensors without memory."""
        if self._row == MST:
            meta = torch.device("meta")
            loss_of = self._made_on(meta)[1]
            explained(loss_of, (llama.token_ids(self._size, length, meta),), _OPTIONS)
            return
        with self._device.tensors():
            ids_BS = llama.token_ids(self._size, length, self._device.torch_device)
            backward(self._model, lambda: self._loss_of(ids_BS))

    def step(self, length: int) -> Callable[[], None]:
        ids_BS = llama.token_ids(self._size, length, self._device.torch_device)
        loss_of = self._loss_of
        torch.compiler.reset()  # each length is compiled with its sizes
        loss_fn = compiled(self._row, lambda: loss_of(ids_BS))
        return lambda: backward(self._model, loss_fn)


def compiled(row: str, loss_fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
    if row == INDUCTOR:
        return torch.compile(own_code(loss_fn), dynamic=False)
    if row == MST:
        return torch.compile(own_code(loss_fn), backend="mst", dynamic=False, options=_OPTIONS)
    return loss_fn


def backward(model: nn.Module, loss_fn: Callable[[], Tensor]) -> None:
    """One step; the gradients are freed at its end."""
    result = loss_fn()
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def _dry_search(job: Job) -> Outcome:
    """One step on tensors without memory, and a search whose answers come from the prediction."""
    predicted, quick = _predicted(job.known, job.row), job.settings.quick
    try:
        _Steps(job).trace(GRAIN if quick else _START)
    except Exception as error:
        return outcome(FAILED, error_text(error))
    probes: list[Probe] = []
    limit, longest = _limit_bytes(job.settings), predicted or _START
    while length := next_length(probes, longest, limit, 0, llama.shape(quick).length):
        fits = length <= longest
        probes.append(Probe(length, fits, limit * length // longest if fits else None))
    found = best(probes)
    return outcome(DRY, length=found.length if found else 0, predicted=predicted)
