"""The first oracle: what a step computes, held to what eager mode computes in float64.

The error of a value is the root mean square of its difference from float64, relative to the root
mean square of the float64 value, or to a thousandth of the largest gradient's where that is more: a
gradient that is zero but for rounding has no relative error. Ours may exceed eager's own error in
the same precision by a factor and a constant, as both round at random. A value that is not finite
must be so in both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mstpass.fuzz.program import Setup, Values

FACTOR = 4.0
ADDED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}
_ROUNDED_SUM = 2.0**-9  # what adding one chunk to a bfloat16 sum may cut off
_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class References:
    """What eager mode computes in each call of a program, by name.

    Attributes:
        exact: the same in float64.
        alone: what Inductor alone computes, where its random numbers are others than eager mode's:
            ours is held to it then, and may be as far from it as eager mode is from float64.
    """

    eager: Sequence[Values]
    exact: Sequence[Values]
    alone: Sequence[Values] | None = None


def wrong_values(ours: Sequence[Values], references: References, setup: Setup) -> dict[str, str]:
    """What is wrong: the name of a value and how it differs, for each that differs."""
    wrong: dict[str, str] = {}
    alone = references.alone
    calls = zip(ours, references.eager, references.exact, strict=True)
    for call, (mine, theirs, true) in enumerate(calls):
        where = "" if call == 0 else f" of call {call + 1}"
        expected, like = (true, theirs) if alone is None else (alone[call], alone[call])
        for name, value in expected.items():
            if name.startswith("output") and mine[name] is None:
                continue  # a placeholder for logits, or no tensor at all
            reason = _unlike(mine[name], like[name], setup)
            if not reason:
                error = _error(mine[name], value, _scale(expected))
                allowed = _error(theirs[name], true[name], _scale(true))
                reason = _too_far(mine[name], error, allowed, setup)
            if reason:
                wrong[name + where] = reason
    return wrong


def _unlike(mine: Tensor | None, theirs: Tensor | None, setup: Setup) -> str:
    """How our value is of another kind than eager mode's, or not equal where it must be."""
    if mine is None or theirs is None:
        there = next((v for v in (mine, theirs) if v is not None), None)
        alike = (mine is None) == (theirs is None) or rms(there) == 0
        return "" if alike else f"ours is {_text(mine)}, eager's {_text(theirs)}"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"ours is {_text(mine)}, eager's {_text(theirs)}"
    if not mine.is_floating_point():
        same = _is_low(setup) or torch.equal(mine, theirs)
        return "" if same else f"{int((mine != theirs).sum())} of {mine.numel()} differ"
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        bad, in_eager = (int((~v.isfinite()).sum()) for v in (mine, theirs))
        return f"{bad} are not finite, {in_eager} in eager"
    return ""


def _too_far(mine: Tensor | None, error: float, eagers: float, setup: Setup) -> str:
    if mine is None or not mine.is_floating_point():
        return ""
    added = ADDED[torch.bfloat16] if _is_low(setup) else ADDED[mine.dtype]
    if _is_low(setup) and setup.options.get("accumulate") == "input":
        added += _ROUNDED_SUM * _most_chunks(setup)
    return "" if error <= FACTOR * eagers + added else f"error {error:.1e}, eager's {eagers:.1e}"


def _most_chunks(setup: Setup) -> int:
    """The most chunks that a call may have under the option ``chunk_tokens``; 0 without it."""
    chunk_tokens = setup.options.get("chunk_tokens")
    tokens = max(batch * length for batch, length in setup.sizes)
    return math.ceil(tokens / chunk_tokens) if chunk_tokens else 0


def _error(value: Tensor | None, true: Tensor | None, scale: float) -> float:
    """The error of a value; infinite where only the true one is zero."""
    if value is None or true is None or not value.is_floating_point():
        return 0.0
    finite = value.isfinite() & true.isfinite()
    base = max(rms(true[finite]), _FLOOR * scale)
    error = rms(value[finite].double() - true[finite])
    if not base:
        return math.inf if error else 0.0
    return error / base


def _scale(values: Values) -> float:
    """The root mean square of the largest gradient."""
    return max((rms(v) for name, v in values.items() if "grad" in name), default=0.0)


def _is_low(setup: Setup) -> bool:
    return setup.autocast or setup.dtype == "bfloat16"


def rms(value: Any) -> float:
    """The root mean square of the finite numbers of a tensor; 0 of what has none."""
    if not isinstance(value, Tensor) or not value.numel() or not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()].double()
    return float(finite.norm()) / math.sqrt(max(1, finite.numel()))


def _text(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
