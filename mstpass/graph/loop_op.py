"""``mst_loop``: an op that runs a loop over chunks of tokens. The loop has no side effects.

    outputs = mst_loop(body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole)

Let N be ``num_tokens`` and c be ``chunk_tokens``. The tensors in ``sliced`` have the tokens first:
``[N, ...]``. Chunk i holds the c rows from ``min(i * c, N - c)`` on, so the last chunk overlaps the
one before it if c does not divide N. The values in ``whole`` are passed to every chunk.
``body(*chunks, *whole[, valid])`` returns one tensor for each of ``specs``:

    ("stack", shape, dtype)  the rows of an output ``[N, ...]``; rows in the overlap are written
                             twice, and are as the last chunk writes them
    (("stack", d), ...)      the same of an output that has its rows in dim d, as the part has
    (("over", k), ...)       the same, in the place of sliced tensor k, which no one reads later
                             (graph/host_copies.py); such outputs come last. Rows in the overlap
                             are written by the last chunk alone
    ("sum", shape, dtype)    a summand of the output, perhaps in a wider dtype. ``valid``, a bool
                             ``[c]`` that is passed only if c does not divide N, is False for rows
                             that the last chunk sums. It is the last one for all outputs, as two
                             computations of a row may differ in their last bits, and what equals
                             a maximum is looked for in another loop
    ("max", shape, dtype)    a part of the output, which is the maximum of all parts; so are "min"
                             and, of bools, "any"
    (("sum", m), ...)        a sum of exponentials relative to the chunk's part of output m, which
                             is a maximum: exp(m_i - m) times it is a summand of the output

If N is symbolic, ``num_chunks`` is None, and the chunks fit the batch at hand: as few chunks of at
most c rows as hold N tokens, all of equal length except for the last, which ends with the tokens
(one chunk of N rows if N < c). The length is a multiple of 16 if c is one, so that rows of half
precision stay aligned to 32 bytes. No chunks overlap, so there is no ``valid``. The first argument
of the body is the length of the chunk: ``body(rows, *chunks, *whole)``.

A body that has an input of the name ``start`` gets the number of the chunk's first row for it,
before the chunks.

Unlike ``while_loop`` the op is cacheable: FxGraphCache and AOTAutogradCache accept graphs that hold
it. loops/lowering.py turns it into an in-place ``while_loop`` later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mstpass.torch_internals.fake_tensors import FakeTensorMode
from mstpass.torch_internals.graphs import HigherOrderOperator, implement

STACK, OVER, SUM, MAX, MIN, ANY = "stack", "over", "sum", "max", "min", "any"
START = "start"  # the name of an input of a body
CONDITION = "mst_cond_"  # what the names of the conditions of lowered loops begin with
_ALIGNED = 16  # tokens
# The pairs: a dim of rows, the position of a maximum, or that of a sliced tensor
Kind = str | tuple[str, int]
OutputSpec = tuple[Kind, tuple[Any, ...], torch.dtype]  # a size is an int, or a node of a graph


class MstLoop(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("mst_loop", cacheable=True)

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = super().__call__(*args)
        return result


mst_loop = MstLoop()


def _fake(mode: FakeTensorMode, *args: Any) -> tuple[torch.Tensor, ...]:
    *_, specs, sliced, _ = args
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
    """Run the loop as its definition says. Backends other than Inductor use this."""
    device = sliced[0].device
    results = [
        torch.full(shape, initial(kind, dtype), dtype=dtype, device=device)
        for kind, shape, dtype in specs
    ]
    for start, rows, sizes, valid in _chunks(num_chunks, chunk_tokens, num_tokens, device):
        chunks = [tensor.narrow(0, start, rows) for tensor in sliced]
        first = (start,) if takes_start(body) else ()
        parts = body(*sizes, *first, *chunks, *whole, *valid)
        new = {  # before the maxima that they read are written
            n: combined(kind, n, results, parts)
            for n, (kind, _, _) in enumerate(specs)
            if stacked_dim(kind) is None
        }
        for position, (kind, _, _) in enumerate(specs):
            dim = stacked_dim(kind)
            if dim is None:
                results[position].copy_(new[position])
            else:
                results[position].narrow(dim, start, rows).copy_(parts[position])
    return tuple(results)


def takes_start(body: Any) -> bool:
    """Whether the body of a loop is given the number of the chunk's first row."""
    graph = getattr(body, "graph", None)
    return graph is not None and any(
        node.target == START for node in graph.find_nodes(op="placeholder")
    )


def stacked_dim(kind: Kind) -> int | None:
    """The dim of a stacked output that its rows are in; None for other outputs."""
    if isinstance(kind, str):
        return 0 if kind == STACK else None
    name, number = kind
    return {STACK: number, OVER: 0}.get(name)


def overwritten(kind: Kind) -> int | None:
    """The position of the sliced tensor that an output is written over; None for other outputs."""
    return kind[1] if not isinstance(kind, str) and kind[0] == OVER else None


# ---- parts of chunks -----------------------------------------------------------------------------
def initial(kind: Kind, dtype: torch.dtype) -> float:
    """What an output holds before the first chunk; of no matter for stacked rows."""
    if kind not in (MAX, MIN):
        return 0
    if dtype.is_floating_point:
        return float("-inf" if kind == MAX else "inf")
    bounds = torch.iinfo(dtype)
    return bounds.min if kind == MAX else bounds.max


def combined(
    kind: Kind, position: int, results: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """What output ``position`` is after a chunk.

    Args:
        results: all outputs before the chunk.
        parts: what the chunk gives.
    """
    result, part = results[position], parts[position]
    if isinstance(kind, str):
        return _COMBINE[kind](result, part)
    old, new = (of[kind[1]].to(result.dtype) for of in (results, parts))
    maximum = torch.maximum(old, new)
    # as long as all values are -inf, there is nothing to be relative to
    pivot = torch.where(maximum.abs() == float("inf"), 0, maximum)
    shape = result.shape  # with or without the dims of size 1 that the maximum has
    return result * (old - pivot).exp().view(shape) + part * (new - pivot).exp().view(shape)


_COMBINE: Mapping[str, Callable[..., torch.Tensor]] = {
    SUM: torch.add,
    MAX: torch.maximum,
    MIN: torch.minimum,
    ANY: torch.logical_or,
}


implement(mst_loop, eager=run_eagerly, fake=_fake)

_Chunk = tuple[int, int, tuple[int, ...], tuple[torch.Tensor, ...]]


def _chunks(
    num_chunks: int | None, chunk_tokens: int, num_tokens: int, device: torch.device
) -> Iterator[_Chunk]:
    """Of each chunk: first row, length, and the body's arguments before and after its tensors."""
    if num_chunks is None:
        length = fitted_length(chunk_tokens, num_tokens) if num_tokens else 1
        for start in range(0, num_tokens, length):
            rows = min(length, num_tokens - start)
            yield start, rows, (rows,), ()
        return
    ragged, last = num_chunks * chunk_tokens != num_tokens, num_tokens - chunk_tokens
    for i in range(num_chunks):
        start = min(i * chunk_tokens, last)
        rows_of_chunk = torch.arange(start, start + chunk_tokens, device=device)
        valid = ((rows_of_chunk < last) | (i == num_chunks - 1),) if ragged else ()
        yield start, chunk_tokens, (), valid


def fitted_length(chunk_tokens: int, num_tokens: int) -> int:
    """The length of equal chunks of at most ``chunk_tokens`` rows; ``num_tokens`` may be symbolic.

    It may exceed ``num_tokens``, by less than ``_ALIGNED``.
    """
    num_chunks = (num_tokens + chunk_tokens - 1) // chunk_tokens
    multiple = 1 if chunk_tokens % _ALIGNED else _ALIGNED
    # In one division: rounding ceil(N / chunks) up to a multiple is ceil(N / (chunks * multiple)).
    parts = num_chunks * multiple
    return (num_tokens + parts - 1) // parts * multiple
