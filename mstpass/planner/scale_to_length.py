"""The partition problem of one sequence length, scaled to another length.

The joint graph is traced with N tokens such that no other size of the model has N's prime factor
(`traced_step.distinct_length`). The bytes of a value therefore tell whether it has N rows. At
another length, values with N rows grow in proportion; so does the time of ops and loops, but that
of attention grows with the square. A loop's chunk keeps its length.

This holds for lengths of many chunks, and serves to search for a length. The length that is
reported is traced itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mstpass.problem.op import CALL
from mstpass.problem.problem import CutProblem, Loop, RegionModes, Value

_PADDINGS = (0, 1, -1)  # transformers pads labels by one token and shifts logits by one

Scale = Callable[[int], int]  # bytes at the traced length to bytes at the other one


def scaled(problem: CutProblem, batch: int, length: int, new_length: int) -> CutProblem:
    """``problem`` of ``batch`` sequences of ``length`` tokens, at ``new_length`` tokens."""
    factor = new_length / length
    token_counts = [batch * (length + padding) for padding in _PADDINGS]

    def scale(size: int) -> int:
        per_token = size and any(size % count == 0 for count in token_counts)
        return int(size * factor) if per_token else size

    return dataclasses.replace(
        problem,
        values=tuple(_value(value, scale, factor) for value in problem.values),
        backward=tuple(_value(value, scale, factor) for value in problem.backward),
        regions=tuple(_region(region, scale, factor) for region in problem.regions),
    )


def _value(value: Value, scale: Scale, factor: float) -> Value:
    size, inner_bytes = scale(value.bytes), scale(value.inner_bytes)
    growth = factor
    if value.kind == CALL and "scaled_dot_product" in value.name:
        # attention within documents of fixed length does not grow at all
        growth = factor * factor if size != value.bytes else 1.0
    return dataclasses.replace(value, bytes=size, inner_bytes=inner_bytes, us=value.us * growth)


def _region(region: RegionModes, scale: Scale, factor: float) -> RegionModes:
    modes = (
        dataclasses.replace(mode, loops=tuple(_loop(loop, scale, factor) for loop in mode.loops))
        for mode in region.modes
    )
    return dataclasses.replace(region, modes=tuple(modes))


def _loop(loop: Loop, scale: Scale, factor: float) -> Loop:
    results = tuple(dataclasses.replace(r, bytes=scale(r.bytes)) for r in loop.results)
    return dataclasses.replace(loop, results=results, us=loop.us * factor)
