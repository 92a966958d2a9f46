"""Measure what an optimizer's step allocates: one parameter after the other,
all at once (foreach), and compiled by Inductor and by mst.

Bytes are relative to those of the parameters. All ways must give the same parameters.

examples:
  mstpass bench optimizer
  mstpass bench optimizer --quick
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mstpass.bench.comparison import INDUCTOR, MST
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.results import Result, Table, Target, times_cell
from mstpass.measure import peak_bytes, timed

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
    count, shape = (4, (64, 64)) if arguments.quick else (16, (1024, 512))
    result = Result("optimizer", f"An optimizer's step: {count} parameters of {shape}, fp32")
    ways = {"eager, one by one": None, FOREACH: None, INDUCTOR: "inductor", MST: "mst"}
    lines: list[tuple[str, ...]] = []
    with advancing("optimizer", len(OPTIMIZERS) * len(ways)) as advance:
        for name, make in OPTIMIZERS.items():
            updates = {
                way: _Update(make, way != next(iter(ways)), backend, count, shape, arguments.device)
                for way, backend in ways.items()
            }
            shares = {}
            for way, update in updates.items():
                advance(f"{name}: {way}")
                shares[way] = update.peak_bytes() / update.parameter_bytes
            error = max(u.difference(updates[FOREACH]) for u in updates.values())
            steps = {way: update.step for way, update in updates.items()}
            times = timed(steps, arguments.repeats, device=arguments.device)
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


class _Update:
    """An optimizer with its parameters and gradients, which are the same for all ways."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        foreach: bool,
        backend: str | None,
        count: int,
        shape: tuple[int, int],
        device: torch.device,
    ):
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape, device=device)) for _ in range(count)]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.device = device
        optimizer = make(self.parameters, foreach=foreach)
        optimizer.step()  # makes the states
        self.step: Callable[[], Any] = optimizer.step
        if backend is not None:
            torch.compiler.reset()
            self.step = torch.compile(optimizer.step, backend=backend)
        self.step()

    @property
    def parameter_bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)

    def peak_bytes(self) -> int:
        return peak_bytes(self.step, self.device)

    def difference(self, other: _Update) -> float:
        """The largest difference of a parameter, relative to the largest parameter."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        largest = max(float(p.detach().abs().max()) for p in other.parameters)
        return max(float((a - b).detach().abs().max()) for a, b in pairs) / largest


main = Benchmark("optimizer", (run,), __doc__)
