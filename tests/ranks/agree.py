"""Ranks that agree on the automatic budget: the least that any of them has left.

No rank has a CUDA device here, so what a device has left is made up. Processes, store, compilations
and steps are real.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass import backend, captured
from mstpass.bench.comparison import own_code
from mstpass.torch_internals import collectives

LEFT = 2**40, 400 * 2**10  # by rank: all that the step needs, and less


PATIENCE_S = 5.0  # of the case whose ranks run different programs
waits_s: list[float] = []  # of this rank for the others, by question


def _device_has(left_bytes: int) -> None:
    backend.device_budget_bytes = lambda *_: left_bytes  # type: ignore[assignment]
    captured.least_of_ranks = _timed_least_of_ranks  # type: ignore[assignment]


def _timed_least_of_ranks(number: int) -> tuple[int, str]:
    start = time.monotonic()
    agreed = collectives.least_of_ranks(number)
    waits_s.append(time.monotonic() - start)
    return agreed


def _new_step(**how: Any) -> Callable[[int], dict[str, Any]]:
    """A step that Dynamo has not seen, by its number of tokens."""
    weight = torch.randn(256, 32, requires_grad=True)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(hidden) @ weight.t(), labels)

    compiled = torch.compile(own_code(loss), backend="mst", **how)

    def step(tokens: int) -> dict[str, Any]:
        before, asked = len(mstpass.reports()), len(waits_s)
        hidden = torch.randn(tokens, 32, requires_grad=torch.is_grad_enabled())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = compiled(hidden, torch.randint(256, (tokens,)))
        if value.requires_grad:
            value.backward()
        messages = [str(w.message) for w in caught if "rank" in str(w.message)]
        outcomes = [report.outcome for report in mstpass.reports()[before:]]
        return {
            "limits": [outcome.limit_bytes for outcome in outcomes if not outcome.no_plan],
            "warnings": messages,
            "waits_s": waits_s[asked:],
        }

    return step


def least() -> dict[str, Any]:
    """Both ranks compile the same; then only one of them compiles again, for another length."""
    rank = dist.get_rank()
    _device_has(LEFT[rank])
    step = _new_step(dynamic=False)
    together = step(512)
    again = step(640 if rank == 0 else 512)
    other = _new_step(dynamic=False)(512 + 128 * rank)  # two lengths in the first step
    return {"together": together, "again": again, "other": other}


def evaluation() -> dict[str, Any]:
    """Only one rank evaluates: it waits for nobody."""
    if dist.get_rank() != 0:
        return {}
    _device_has(LEFT[0])
    with torch.no_grad():
        return _new_step()(512)


def alone() -> dict[str, Any]:
    """One rank runs another program; neither waits for ever."""
    collectives.PATIENCE_S = PATIENCE_S
    _device_has(LEFT[dist.get_rank()])
    first = _new_step(dynamic=False)(512) if dist.get_rank() == 0 else {}
    dist.barrier()
    second = _new_step(dynamic=False)(512)
    return {"first": first, "second": second}
