"""Measures the rows of a case: each way to run one step, timed in turn with the first way.

The first way is Inductor's. Its value and gradients are what those of the others are compared with,
and each other way is compiled, run, and timed in rounds that alternate with Inductor's steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import mstpass
from mstpass.bench import comparison
from mstpass.bench.comparison import Contender, compare_outcomes, error_text
from mstpass.bench.gpu.device import time_in_turn
from mstpass.bench.gpu.state import (
    DRY,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    SKIPPED,
    Case,
    Job,
    Outcome,
    outcome,
)
from mstpass.bench.models import Step, Work
from mstpass.bench.results import Row, write_plan
from mstpass.errors import MissingPackageError
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


def measure(job: Job, build: Build, ways: Sequence[Contender]) -> Outcome:
    """Measure the row of a job, which has the name of a way."""
    way = next(way for way in ways if way.name == job.row)
    if way.missing:
        return outcome(SKIPPED, way.missing)
    try:
        return _measured(job, build, ways[0], way) if job.device.runs else _planned(job, build, way)
    except MissingPackageError as error:
        return outcome(SKIPPED, str(error))
    except Exception as error:
        if is_out_of_memory(error):
            return outcome(OUT_OF_MEMORY)
        return outcome(FAILED, error_text(error))


def _measured(job: Job, build: Build, base: Contender, way: Contender) -> Outcome:
    """Compile and run a way, compare its value and gradients with the first way's, and time both.

    A first way that did not run before does not run here either.
    """
    device = job.device
    with device.tensors():
        work = build(device.torch_device)
    steps: dict[str, Step] = {}
    reference: tuple[str, tuple[Tensor, list[Tensor]]] | None = None
    if job.row != base.name and job.known.get(base.name, {}).get("status", MEASURED) == MEASURED:
        steps[base.name] = work.step(base.build(work.loss_fn(base.loss_fn)))
        reference = base.name, comparison.first_call(base, steps[base.name], Row(base.name))
    row, step = Row(way.name), work.step(way.build(work.loss_fn(way.loss_fn)))
    with fresh_cache():  # a hit would hide the compile time, and whether the auto_chunker ran
        found = comparison.first_call(way, step, row)
        step()  # kernels that are loaded late are still in the cache
    if reference is not None:
        compare_outcomes(row, found, reference, TOLERANCES)
    steps[job.row] = step
    row.peak_bytes = device.peak_bytes(step)
    with recompilation_fails():  # a recompilation would be timed as a step
        seconds = time_in_turn(device, steps, job.settings.quick)
    row.seconds = seconds[job.row]
    more = figures(row, seconds.get(base.name), work)
    return outcome(MEASURED, clocks=device.clocks(), **more)


def _planned(job: Job, build: Build, way: Contender) -> Outcome:
    """Trace and plan a way without a device, and run all that computes figures."""
    device, extra = job.device, dict[str, Any]()
    with device.tensors():
        work = build(device.torch_device)
    row, step = Row(way.name), work.step(work.loss_fn(way.loss_fn))
    if way.own_kernels:
        row.plan = "not traced: it launches kernels of its own"
    elif way.options is not None:
        planned = build(torch.device("meta"))
        report = explained(planned.fn, planned.args, way.options)
        write_plan(row, [report])
        extra["baseline_bytes"] = report.outcome.baseline_peak_bytes
    else:
        with device.tensors():
            step()
    row.peak_bytes, row.seconds = device.peak_bytes(step), [device.seconds(step)]
    return outcome(DRY, **figures(row, row.seconds, work), **extra)


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
