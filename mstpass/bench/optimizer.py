"""Measure what an optimizer's step allocates: one parameter after the other,
all at once (foreach), and compiled by Inductor and by mst.

Bytes are relative to those of the parameters. All ways must give the same parameters.

examples:
  mstpass bench optimizer
  mstpass bench optimizer --quick
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.bench.comparison import INDUCTOR, MST
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.results import Result, Table, Target, times_cell
from mstpass.measure import peak_bytes, timed

_Update = tuple[list[nn.Parameter], Callable[[], Any]]  # parameters, and what updates them
Optimizers = Mapping[str, Callable[..., torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "AdamW": torch.optim.AdamW,
    "AdamW, amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True),
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}
FOREACH = "eager, foreach"
LIMIT = 0.01  # of the parameters' bytes
_TOLERANCE = 1e-5  # of the parameters, relative to the largest


def run(arguments: Arguments) -> Result:
    device = arguments.device
    count, shape = (4, (64, 64)) if arguments.quick else (16, (1024, 512))
    result = Result("optimizer", f"An optimizer's step: {count} parameters of {shape}, fp32")
    ways = {"eager, one by one": None, FOREACH: None, INDUCTOR: "inductor", MST: "mst"}
    lines: list[tuple[str, ...]] = []
    with advancing("optimizer", len(OPTIMIZERS) * len(ways)) as advance:
        for name, make in OPTIMIZERS.items():
            updates = {
                way: _updated(make, way != next(iter(ways)), backend, count, shape, device)
                for way, backend in ways.items()
            }
            expected = updates[FOREACH][0]
            error = max(_difference(parameters, expected) for parameters, _ in updates.values())
            steps = {way: step for way, (_, step) in updates.items()}
            shares = {}
            for way, step in steps.items():
                advance(f"{name}: {way}")
                shares[way] = peak_bytes(step, device) / sum(p.nbytes for p in expected)
            times = timed(steps, arguments.repeats, device=device)
            relative = [times[way].ratio_to(times[FOREACH]) for way in (INDUCTOR, MST)]
            lines.append((name, *map(times_cell, (*shares.values(), *relative))))
            result.targets += [
                Target(f"{name}: bytes of mst / parameters", shares[MST], LIMIT),
                Target(f"{name}: error of parameters", error, _TOLERANCE),
            ]
    columns = ("", *ways, f"time: {INDUCTOR} / foreach", f"time: {MST} / foreach")
    result.tables.append(Table("temporaries / parameters", columns, tuple(lines)))
    result.notes.append("Bytes that exist at once while the step runs, beyond those before it.")
    return result


def _updated(
    make: Callable[..., torch.optim.Optimizer],
    foreach: bool,
    backend: str | None,
    count: int,
    shape: tuple[int, int],
    device: torch.device,
) -> _Update:
    """Parameters after two steps, the same for all ways but for their rounding, and the step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters, foreach=foreach)
    optimizer.step()  # makes the states
    step: Callable[[], Any] = optimizer.step
    if backend is not None:
        torch.compiler.reset()
        step = torch.compile(optimizer.step, backend=backend)
    step()
    return parameters, step


def _difference(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of a parameter, relative to the largest of the others."""
    largest = max(float(p.detach().abs().max()) for p in others)
    pairs = zip(parameters, others, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs) / largest


main = Benchmark("optimizer", (run,), __doc__)
