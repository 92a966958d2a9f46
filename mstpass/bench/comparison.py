"""Compares several ways to run one step: their results, times and peaks.

Contenders are compiled one after the other, and timed in interleaved rounds. A contender that
raises an exception, or whose value or gradients differ from those of the first contender, drops out
with its error. The others continue.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import mstpass
from mstpass.bench.harness import Arguments, advancing
from mstpass.bench.models import LossFn, Step, Work
from mstpass.bench.results import Row, write_plan
from mstpass.measure import peak_bytes, timed
from mstpass.torch_internals import versions
from mstpass.torch_internals.caches import fresh_cache, num_auto_chunked
from mstpass.torch_internals.settings import recompilation_fails

INDUCTOR, MST = "Inductor", "mst"
_NOISE = 1e-8  # gradients below this part of the largest are zero but for rounding
_AUTO_CHUNKER = {
    "auto_chunker.enable": True,
    # by its default thresholds it skips heads with V/D below about 8
    "auto_chunker.output_size_threshold": 1024,
    "auto_chunker.amplify_ratio_threshold": 1,
}
_ERROR_CHARS = 110
_numbers = itertools.count()

F = TypeVar("F", bound=Callable[..., Tensor])
Outcome = tuple[Tensor, list[Tensor]]  # a step's value and gradients


@dataclass(frozen=True)
class Contender:
    """A way to run a loss function.

    Attributes:
        build: compiles a loss function.
        loss_fn: the loss function, of the work's arguments; None: that of the work.
        work: makes what is compiled, where each contender has a model of its own.
        under: context manager that is active during the first call, which compiles.
        auto_chunker: whether Inductor's auto_chunker must have chunked something.
        options: mst's options; None for others.
        missing: why it cannot be run here.
        own_kernels: it launches kernels of its own, which cannot be traced without a GPU.
    """

    name: str
    build: Callable[[LossFn], LossFn]
    loss_fn: Callable[..., Tensor] | None = None
    work: Callable[[], Work] | None = None
    under: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    auto_chunker: bool = False
    options: Mapping[str, Any] | None = None
    missing: str = ""
    own_kernels: bool = False


Fn = Callable[..., Tensor]


def eager(name: str = "eager", loss_fn: Fn | None = None, **rest: Any) -> Contender:
    return Contender(name, lambda fn: fn, loss_fn, **rest)


def inductor(name: str = INDUCTOR, loss_fn: Fn | None = None, **rest: Any) -> Contender:
    return Contender(name, lambda fn: torch.compile(own_code(fn)), loss_fn, **rest)


def mst(name: str = MST, **options: Any) -> Contender:
    # strict: where mst falls back to Inductor, Inductor would be measured under mst's name
    chosen = {"strict": True, **options}
    build = lambda fn: torch.compile(own_code(fn), backend="mst", options=chosen)
    return Contender(name, build, options=options)


def auto_chunker(name: str = "Inductor, auto_chunker", chunks: int = 8) -> Contender:
    options = {**_AUTO_CHUNKER, "auto_chunker.num_chunk": chunks}
    build = lambda fn: torch.compile(own_code(fn), options=dict(options))
    return Contender(name, build, auto_chunker=True)


def linear_cross_entropy() -> Callable[..., Tensor] | None:
    """torch's own chunked head, of x, w, y and options; None if this torch has none."""
    found = versions.linear_cross_entropy()
    if found is None:
        return None
    function, options = found
    return lambda x_ND, w_VD, y_N, **chosen: function(x_ND, w_VD, y_N, options=options(**chosen))


def own_code(fn: F) -> F:
    """A copy of `fn` with its own code object and name, for which Dynamo compiles anew.

    Dynamo caches graphs by code object, and notes by name which sizes have varied.
    """
    target = fn.__func__ if isinstance(fn, types.MethodType) else fn
    assert isinstance(target, types.FunctionType), "the target is a function"
    copy = types.FunctionType(
        target.__code__.replace(co_name=f"{target.__name__}_{next(_numbers)}"),
        target.__globals__,
        target.__name__,
        target.__defaults__,
        target.__closure__,
    )
    own: Any = types.MethodType(copy, fn.__self__) if isinstance(fn, types.MethodType) else copy
    return own


class Comparison:
    """Contenders that may be added at different times, and are timed in the same rounds.

    Args:
        work: None where every contender has its own.
        ranks: where ranks run the same steps, which have collectives, they meet before each timed
            step. An error ends the whole comparison: a rank that went on would wait for the others.
        reference: the name, the value and the gradients that all are compared with.

    Attributes:
        rows: figures by contender; the first contender is the reference for values and gradients.
        steps: compiled steps by contender.
        advance: called with a contender's name when it has been added, after each of its timed
            steps, and when its peak is known.
    """

    def __init__(
        self,
        work: Work | None,
        device: torch.device,
        advance: Callable[[str], None] = lambda name: None,
        *,
        ranks: bool = False,
        reference: tuple[str, Outcome] | None = None,
    ):
        torch.compiler.reset()
        self.rows: dict[str, Row] = {}
        self.steps: dict[str, Step] = {}
        self.advance = advance
        self._work, self._device, self._ranks = work, device, ranks
        self._reference = reference
        self._errors_to = contextlib.nullcontext if ranks else errors_to

    def add(self, contenders: Sequence[Contender]) -> None:
        """Compile and run each step, and compare its value and gradients with the reference's."""
        # A cache hit would hide the compile time, and whether the auto_chunker has run; but ranks,
        # which compile alike, have one new cache together.
        with contextlib.nullcontext() if self._ranks else fresh_cache():
            for contender in contenders:
                row = self.rows[contender.name] = Row(contender.name)
                with self._errors_to(row):
                    work = contender.work() if contender.work else self._work
                    assert work is not None, "it is the contender's or the comparison's"
                    step = work.step(contender.build(work.loss_fn(contender.loss_fn)))
                    result = first_call(contender, step, row)
                    self._reference = self._reference or (contender.name, result)
                    compare_outcomes(row, result, self._reference, work.tolerances)
                    step()
                    self.steps[contender.name] = step
                self.advance(contender.name)

    def measure_peaks(self, times: int = 1) -> None:
        """Measure the peak of each contender that has none yet: the lowest of so many steps."""
        for name, step in self.steps.items():
            row = self.rows[name]
            if row.peak_bytes is None:
                with self._errors_to(row):
                    row.peak_bytes = min(peak_bytes(step, self._device) for _ in range(times))
                self.advance(name)

    def time(self, repeats: int) -> None:
        """Time rounds of one step per contender.

        Each round begins with another contender, so that none always follows the same one.
        """
        self._reference = None  # free its memory: no other step would hold it
        for number in range(repeats):
            gc.collect()
            running = [name for name in self.steps if not self.rows[name].error]
            start = number % max(1, len(running))
            for name in running[start:] + running[:start]:
                if self._ranks:
                    torch.distributed.barrier()
                # a recompilation would be timed as a step
                with self._errors_to(self.rows[name]), recompilation_fails():
                    step = {name: self.steps[name]}
                    timing = timed(step, 1, warmup=0, device=self._device)[name]
                    self.rows[name].seconds += timing.seconds
                self.advance(name)


def compare(
    contenders: Sequence[Contender],
    work: Work,
    arguments: Arguments,
    advance: Callable[[str], None] = lambda name: None,
    reference: tuple[str, Outcome] | None = None,
) -> dict[str, Row]:
    """Figures by contender; the first one is the reference where none is given.

    `advance` is called 2 + `repeats` times with each contender's name.
    """
    comparison = Comparison(work, arguments.device, advance, reference=reference)
    comparison.add(contenders)
    comparison.time(arguments.repeats)
    comparison.measure_peaks()
    return comparison.rows


def measured(
    title: str, contenders: Sequence[Contender], work: Work, arguments: Arguments
) -> dict[str, Row]:
    """Figures by contender, with a progress bar of that title."""
    with advancing(title, len(contenders) * (2 + arguments.repeats)) as advance:
        return compare(contenders, work, arguments, advance)


def compare_outcomes(
    row: Row, result: Outcome, named: tuple[str, Outcome], tolerances: tuple[float, float]
) -> None:
    """Write a row's errors against a reference, which has a name.

    Args:
        tolerances: the largest relative errors of the value, and of a gradient.

    Raises:
        RuntimeError: an error is larger than its tolerance.
    """
    (name, reference), (value_tolerance, gradient_tolerance) = named, tolerances
    row.value_error = _relative_error(result[0], reference[0])
    if not row.value_error <= value_tolerance:
        raise RuntimeError(f"its value differs from that of {name} by {row.value_error:.1e}")
    noise = _NOISE * max(_rms(b) for b in reference[1])
    errors = [
        _relative_error(a, b)
        for a, b in zip(result[1], reference[1], strict=True)
        if not (_rms(a) <= noise and _rms(b) <= noise)
    ]
    row.gradient_error = max(errors, key=lambda error: (math.isnan(error), error))
    if not row.gradient_error <= gradient_tolerance:
        raise RuntimeError(f"a gradient differs from that of {name} by {row.gradient_error:.1e}")


def first_call(contender: Contender, step: Step, row: Row) -> Outcome:
    """Run a step for the first time, which compiles it; write its value, time and plan."""
    reports, chunked = len(mstpass.reports()), num_auto_chunked()
    with contender.under():
        start = time.perf_counter()
        result = step.with_gradients()
        row.first_call_s = time.perf_counter() - start
    row.value = result[0].mean().item()
    write_plan(row, mstpass.reports()[reports:])
    if contender.auto_chunker and num_auto_chunked() == chunked:
        raise RuntimeError("the auto_chunker chunked nothing")
    return result


def _relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def _rms(tensor: Tensor) -> float:
    return float(tensor.norm()) / max(1, tensor.numel()) ** 0.5


@contextlib.contextmanager
def errors_to(row: Row) -> Iterator[None]:
    """Write the text of an error that is raised to the row."""
    try:
        yield
    except Exception as error:
        row.error = error_text(error)


def error_text(error: BaseException) -> str:
    """An error on one line of at most 110 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _ERROR_CHARS else text[: _ERROR_CHARS - 3] + "..."
