"""The partition problem of one sequence length, scaled to another length and another batch.

The joint graph is traced with N tokens such that no other size of the model has N's prime factor
(`traced_step.distinct_length`). The bytes of a value therefore tell whether it has N rows. At
another length, values with N rows grow in proportion, and those of N rows and N columns, which are
masks and scores, with the square; the time of ops and loops grows in proportion, and so does the
workspace of attention, whose time grows with the square. A loop's chunk keeps its length, but a
loop over groups of heads holds all tokens of one group. More sequences of the same length are as
many tokens, but attention's time is in proportion to them. (What all sequences share, such as
rotary embeddings, grows with them here: too much by some per cent.)

This holds for lengths of many chunks, and serves to search for a length. The length that is
reported is traced itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from mstpass.problem.op import CALL
from mstpass.problem.problem import CutProblem, Loop, RegionModes, Value

_PADDINGS = (0, 1, -1)  # transformers pads labels by one token and shifts logits by one

Scale = Callable[[int], int]  # bytes at the traced length to bytes at the other one


def scaled(
    problem: CutProblem, batch: int, length: int, new_length: int, new_batch: int | None = None
) -> CutProblem:
    """``problem`` of ``batch`` sequences of ``length`` tokens, at ``new_length`` tokens.

    Args:
        new_batch: the number of sequences there; None: as many.
    """
    factors = _Factors(new_length / length, (new_batch or batch) / batch)
    token_counts = [batch * (length + padding) for padding in _PADDINGS]

    def scale(size: int) -> int:
        if size and size % length**2 == 0:
            return int(size * factors.tokens * factors.length)
        per_token = size and any(size % count == 0 for count in token_counts)
        return int(size * factors.tokens) if per_token else size

    us = {v.name: v.us for v in (*problem.values, *problem.backward)}
    # Attention within documents of a fixed length does not grow.
    growing = {v.name for v in (*problem.values, *problem.backward) if scale(v.bytes) != v.bytes}

    def scaled_value(value: Value) -> Value:
        attention = value.kind == CALL and _is_attention(value.name)
        size, time, inner_bytes = scale(value.bytes), value.us * factors.tokens, value.inner_bytes
        if attention:
            grows = not growing.isdisjoint(value.inputs)
            time = time * factors.length if grows else value.us * factors.batch
            inner_bytes = int(inner_bytes * (factors.tokens if grows else factors.batch))
        return dataclasses.replace(
            value,
            bytes=size,
            inner_bytes=inner_bytes,
            us=time,
            numel=scale(value.numel),
            outer_sizes=tuple(map(scale, value.outer_sizes)),
            loops_end=tuple(map(scale, value.loops_end)),
        )

    return dataclasses.replace(
        problem,
        values=tuple(map(scaled_value, problem.values)),
        backward=tuple(map(scaled_value, problem.backward)),
        regions=tuple(_region(region, scale, factors, us) for region in problem.regions),
    )


@dataclasses.dataclass(frozen=True)
class _Factors:
    """How many times as long each sequence is, and how many times as many sequences there are."""

    length: float
    batch: float

    @property
    def tokens(self) -> float:
        return self.length * self.batch


def _region(
    region: RegionModes, scale: Scale, factors: _Factors, us: Mapping[str, float]
) -> RegionModes:
    modes = []
    for mode in region.modes:
        loops = tuple(_loop(loop, scale, factors, us) for loop in mode.loops)
        if not mode.wide:
            loops = tuple(_with_all_tokens(loop, factors) for loop in loops)
        modes.append(dataclasses.replace(mode, loops=loops))
    return dataclasses.replace(region, modes=tuple(modes))


def _loop(loop: Loop, scale: Scale, factors: _Factors, us: Mapping[str, float]) -> Loop:
    results = tuple(dataclasses.replace(r, bytes=scale(r.bytes)) for r in loop.results)
    attention_us = min(loop.us, sum(us[n] for n in loop.members if _is_attention(n)))
    more_us = attention_us * (factors.length - 1)
    return dataclasses.replace(loop, results=results, us=(loop.us + more_us) * factors.tokens)


def _with_all_tokens(loop: Loop, factors: _Factors) -> Loop:
    """The loop; over heads, with the workspace of a group of them."""
    if not any(map(_is_attention, loop.members)):
        return loop
    in_rows = tuple((name, int(size * factors.tokens)) for name, size in loop.in_rows)
    inner_bytes = int(loop.inner_bytes * factors.tokens)
    return dataclasses.replace(loop, inner_bytes=inner_bytes, in_rows=in_rows)


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name
