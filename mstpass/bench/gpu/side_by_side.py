"""Measures the rows of a case: each way to run one step, timed in turn with the first way.

The first way is Inductor's. Its value and gradients are what those of the others are compared with,
and each other way is compiled, run, and timed in rounds that alternate with Inductor's steps. So a
row is finished, and kept, before the next one starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import mstpass
from mstpass.bench import comparison
from mstpass.bench.comparison import Contender, Outcome, compare_outcomes, error_text
from mstpass.bench.gpu.device import time_in_turn
from mstpass.bench.gpu.job import Job, Restart
from mstpass.bench.gpu.state import DRY, FAILED, MEASURED, OUT_OF_MEMORY, SKIPPED, Case
from mstpass.bench.models import Step, Work
from mstpass.bench.results import Row, write_plan
from mstpass.torch_internals.caches import fresh_cache
from mstpass.torch_internals.settings import recompilation_fails

# relative errors of bfloat16 results, whose sums are rounded in different orders
TOLERANCES = 0.01, 0.05


Build = Callable[[torch.device], Work]  # makes the work on a device
Measured = Mapping[str, tuple[Build, Sequence[Contender]]]  # by name of the case


def cases_of(part: str, measured: Measured, limit_s: float) -> list[Case]:
    return [
        Case(part, name, tuple(way.name for way in ways), limit_s)
        for name, (_, ways) in measured.items()
    ]


def measure(job: Job, build: Build, ways: Sequence[Contender]) -> None:
    """Measure the wanted rows of a job; the name of a way is that of its row."""
    bench = _Bench(job, build) if job.device.runs else _DryBench(job, build)
    for number, way in enumerate(ways):
        wanted = way.name in job.wanted
        if wanted:
            job.start(way.name)
        if way.missing:
            if wanted:
                job.finish(way.name, SKIPPED, way.missing)
            continue
        try:
            if number == 0:
                bench.add_base(way, wanted)
            elif wanted:
                bench.add(way if way.from_peaks is None else way.from_peaks(bench.peaks))
        except Restart:
            raise
        except Exception as error:
            status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
            text = "" if status == OUT_OF_MEMORY else error_text(error)
            if wanted:
                job.finish(way.name, status, text)
        job.device.free()


class _Bench:
    """Measures ways on a device.

    Attributes:
        _base: the name and the step of the first way; None if it cannot run.
        _reference: its value and gradients.
        peaks: bytes of the rows that were measured, by name; in a dry run simulated ones.
    """

    def __init__(self, job: Job, build: Build):
        torch.compiler.reset()
        self._job, self._build = job, build
        with job.device.tensors():
            self._work = build(job.device.torch_device)
        self._base: tuple[str, Step] | None = None
        self._reference: Outcome | None = None
        self.peaks = dict(_peaks(job.known.outcomes))

    def add_base(self, way: Contender, wanted: bool) -> None:
        """Prepare the first way, and measure it if its row is wanted."""
        known = self._job.known.outcomes.get(way.name)
        if not wanted and known is not None and known["status"] != MEASURED:
            return  # it did not run before either
        row, step, outcome = self._first(way)
        self._base, self._reference = (way.name, step), outcome
        if wanted:
            self._finish(way, row, {way.name: step})

    def add(self, way: Contender) -> None:
        row, step = self._first(way)[:2]
        base = dict([self._base]) if self._base is not None else {}
        self._finish(way, row, {**base, way.name: step})

    def _first(self, way: Contender) -> tuple[Row, Step, Outcome]:
        """Compile and run a way, and compare its value and gradients with the first way's."""
        row = Row(way.name)
        step = self._work.step(way.build(self._work.loss_fn(way.loss_fn)))
        with fresh_cache():  # a hit would hide the compile time, and whether the auto_chunker ran
            outcome = comparison.first_call(way, step, row)
            step()  # kernels that are loaded late are still in the cache
        if self._reference is not None and self._base is not None:
            compare_outcomes(row, outcome, (self._base[0], self._reference), TOLERANCES)
        return row, step, outcome

    def _finish(self, way: Contender, row: Row, steps: Mapping[str, Step]) -> None:
        device, job = self._job.device, self._job
        step = steps[way.name]
        self.peaks[way.name] = row.peak_bytes = device.peak_bytes(step)
        with recompilation_fails():  # a recompilation would be timed as a step
            seconds = time_in_turn(device, steps, job.settings.quick)
        base = seconds[self._base[0]] if self._base is not None else None
        row.seconds = seconds[way.name]
        job.finish(way.name, MEASURED, clocks=device.clocks(), **figures(row, base, self._work))


class _DryBench(_Bench):
    """Traces and plans ways without a device, and runs all that computes figures."""

    def add_base(self, way: Contender, wanted: bool) -> None:
        self._base = way.name, self._work.step(self._work.loss_fn(way.loss_fn))
        if wanted:
            self.add(way)

    def add(self, way: Contender) -> None:
        row, step = Row(way.name), self._work.step(self._work.loss_fn(way.loss_fn))
        extra: dict[str, Any] = {}
        if way.own_kernels:
            row.plan = "not traced: it launches kernels of its own"
        elif way.options is not None:
            planned = self._build(torch.device("meta"))
            report = explained(planned.fn, planned.args, way.options)
            write_plan(row, [report])
            extra["baseline_bytes"] = report.outcome.baseline_peak_bytes
            if report.peak_bytes is not None:
                self.peaks[way.name] = report.peak_bytes
        else:
            with self._job.device.tensors():
                step()
        steps = {**dict([self._base or (way.name, step)]), way.name: step}
        seconds = time_in_turn(self._job.device, steps, self._job.settings.quick)
        row.peak_bytes, row.seconds = self._job.device.peak_bytes(step), seconds[way.name]
        base = seconds[next(iter(seconds))]
        self._job.finish(way.name, DRY, **figures(row, base, self._work), **extra)


def _peaks(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """The peaks of finished rows; of dry ones as simulated."""
    for name, outcome in outcomes.items():
        size = outcome.get("simulated_bytes" if outcome["status"] == DRY else "peak_bytes")
        if size:
            yield name, size


def explained(
    fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> mstpass.Report:
    """What mst plans for a step on this machine's GPU; where it has none, on an H100.

    Args:
        fn: a function of its arguments alone, or a module; all tensors may be on meta.
    """
    return mstpass.explain(fn, *args, options={"strict": True, **options}, device="cuda")


def figures(row: Row, base: Sequence[float] | None, work: Work) -> dict[str, Any]:
    """The figures of a row, with its times against the base's of the same rounds."""
    ratios = [a / b for a, b in zip(row.seconds, base, strict=True)] if base else []
    median_s = statistics.median(row.seconds)
    return {
        "peak_bytes": row.peak_bytes,
        "simulated_bytes": row.simulated_bytes,
        "estimated": row.estimated,
        "seconds": row.seconds,
        "median_s": median_s,
        "base_seconds": list(base or ()),
        "ratio": [statistics.median(ratios), min(ratios), max(ratios)] if ratios else None,
        "flops_per_s": work.flops / median_s if work.flops else None,
        "first_call_s": row.first_call_s,
        "value_error": row.value_error,
        "gradient_error": row.gradient_error,
        "plan": row.plan,
    }


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is that the device has no memory left."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in text:
            return True
        if "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDA error: out of memory" in text:
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
