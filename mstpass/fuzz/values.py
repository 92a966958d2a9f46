"""The first oracle: what a step computes, held to what eager mode computes in float64.

The error of a value is the root mean square of its difference from float64, relative to the root
mean square of the float64 value, or to a thousandth of the largest gradient's where that is more: a
gradient that is zero but for rounding has no relative error. Ours may exceed eager's own error in
the same precision by a factor and a constant, as both round at random. A value that is not finite
must be so in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mstpass.fuzz.program import Setup, Values

FACTOR = 4.0
ADDED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}
_FLOOR = 1e-3


def wrong_values(
    ours: Sequence[Values], eager: Sequence[Values], exact: Sequence[Values], setup: Setup
) -> dict[str, str]:
    """What is wrong: the name of a value and how it differs, for each that differs."""
    wrong: dict[str, str] = {}
    for call, (mine, theirs, true) in enumerate(zip(ours, eager, exact, strict=True)):
        where = "" if call == 0 else f" of call {call + 1}"
        scale = max((_rms(v) for name, v in true.items() if "grad" in name), default=0.0)
        for name, value in true.items():
            if name.startswith("output") and mine[name] is None:
                continue  # a placeholder for logits, or no tensor at all
            reason = _difference(mine[name], theirs[name], value, scale, setup)
            if reason:
                wrong[name + where] = reason
    return wrong


def _difference(
    mine: Tensor | None, theirs: Tensor | None, true: Tensor | None, scale: float, setup: Setup
) -> str:
    """How our value is wrong; empty if it is right."""
    if mine is None or theirs is None or true is None:
        there = next((v for v in (mine, true) if v is not None), None)
        alike = (mine is None) == (true is None) or _rms(there) == 0
        return "" if alike else f"ours is {_text(mine)}, eager's {_text(theirs)}"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"ours is {_text(mine)}, eager's {_text(theirs)}"
    low = setup.autocast or setup.dtype == "bfloat16"
    if not mine.is_floating_point():
        same = low or torch.equal(mine, theirs)
        return "" if same else f"{int((mine != theirs).sum())} of {mine.numel()} differ"
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        bad, in_eager = (int((~v.isfinite()).sum()) for v in (mine, theirs))
        return f"{bad} are not finite, {in_eager} in eager"
    finite = mine.isfinite() & true.isfinite()
    base = max(_rms(true[finite]), _FLOOR * scale)
    if not base:
        return "" if _rms(mine[finite]) == 0 or _rms(theirs[finite]) > 0 else "ours is not zero"
    own, others = (_rms(v[finite].double() - true[finite]) / base for v in (mine, theirs))
    added = ADDED[torch.bfloat16] if low else ADDED[mine.dtype]
    return "" if own <= FACTOR * others + added else f"error {own:.1e}, eager's {others:.1e}"


def _rms(value: Tensor | None) -> float:
    if value is None or not value.numel() or not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()].double()
    return float(finite.norm()) / math.sqrt(max(1, finite.numel()))


def _text(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
