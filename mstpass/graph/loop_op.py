"""``mst_loop``: a pure loop over chunks of tokens, as one op in the graph.

    outputs = mst_loop(body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole)

``sliced`` tensors have tokens first, ``[N, ...]``; chunk i holds the rows from
``min(i * c, N - c)``, so the last chunk overlaps the one before it where c does not divide N.
``body(*chunks, *whole[, valid])`` returns one tensor for each of ``specs``:

    ("stack", shape, dtype): rows of an output ``[N, ...]``; repeated rows are written twice, alike.
    ("sum", shape, dtype):   a partial sum. ``valid``, a bool ``[c]`` that is passed where c does
                             not divide N, tells the rows that no earlier chunk has summed.

Where N is symbolic, ``num_chunks`` is None and chunks fit the batch at hand instead: as few as may
hold at most c rows each, all of the same length but for the last, which ends with the tokens (one
chunk of N rows where N < c). None overlap, so there is no ``valid``; the body's first argument is
the chunk's length: ``body(rows, *chunks, *whole)``.

The op is cacheable, unlike ``while_loop``: FxGraphCache and AOTAutogradCache take graphs that hold
it (checked with torch 2.13). lower.py turns it into an in-place ``while_loop`` after both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.higher_order_ops import implement
from mstpass.torch_internals.op_types import HigherOrderOperator

STACK, SUM = "stack", "sum"
OutputSpec = tuple[str, tuple[Any, ...], torch.dtype]  # sizes: ints, or nodes of a graph


class MstLoop(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("mst_loop", cacheable=True)

    def __call__(
        self,
        body: Callable[..., Any],
        num_chunks: int | None,
        chunk_tokens: int,
        num_tokens: int,
        specs: tuple[OutputSpec, ...],
        sliced: tuple[torch.Tensor, ...],
        whole: tuple[torch.Tensor | int, ...],
    ) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = super().__call__(
            body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole
        )
        return result


mst_loop = MstLoop()


def _fake(
    mode: FakeTensorMode,
    body: Any,
    num_chunks: int | None,
    chunk_tokens: int,
    num_tokens: int,
    specs: tuple[OutputSpec, ...],
    sliced: tuple[torch.Tensor, ...],
    whole: tuple[torch.Tensor | int, ...],
) -> tuple[torch.Tensor, ...]:
    device = sliced[0].device
    with mode:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in specs)


def run_eagerly(
    body: Callable[..., Any],
    num_chunks: int | None,
    chunk_tokens: int,
    num_tokens: int,
    specs: tuple[OutputSpec, ...],
    sliced: tuple[torch.Tensor, ...],
    whole: tuple[torch.Tensor | int, ...],
) -> tuple[torch.Tensor, ...]:
    """The loop as its definition says; what backends without Inductor's lowering run."""
    device = sliced[0].device
    results = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype in specs]
    for start, rows, sizes, valid in _chunks(num_chunks, chunk_tokens, num_tokens, device):
        chunks = [tensor.narrow(0, start, rows) for tensor in sliced]
        parts = body(*sizes, *chunks, *whole, *valid)
        for (kind, _, _), result, part in zip(specs, results, parts, strict=True):
            if kind == STACK:
                result.narrow(0, start, rows).copy_(part)
            else:
                result.add_(part)
    return tuple(results)


implement(mst_loop, eager=run_eagerly, fake=_fake)

_Chunk = tuple[int, int, tuple[int, ...], tuple[torch.Tensor, ...]]


def _chunks(
    num_chunks: int | None, chunk_tokens: int, num_tokens: int, device: torch.device
) -> Iterator[_Chunk]:
    """First row, length, and what the body gets before and after its tensors."""
    if num_chunks is None:
        length = fitted_length(chunk_tokens, num_tokens)
        for start in range(0, num_tokens, length):
            rows = min(length, num_tokens - start)
            yield start, rows, (rows,), ()
        return
    ragged = num_chunks * chunk_tokens != num_tokens
    for i in range(num_chunks):
        start = min(i * chunk_tokens, num_tokens - chunk_tokens)
        numbers = torch.arange(start, start + chunk_tokens, device=device)
        valid = (numbers >= i * chunk_tokens,) if ragged else ()
        yield start, chunk_tokens, (), valid


def fitted_length(chunk_tokens: int, num_tokens: int) -> int:
    """The length of equal chunks of at most ``chunk_tokens`` rows; symbols may stand for both."""
    num_chunks = (num_tokens + chunk_tokens - 1) // chunk_tokens
    return (num_tokens + num_chunks - 1) // num_chunks
