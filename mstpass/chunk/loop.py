"""``mst_loop``: a pure loop over chunks of tokens, as one op in the graph.

    outputs = mst_loop(body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole)

``sliced`` tensors have tokens first, ``[N, ...]``; chunk i holds the rows from
``min(i * c, N - c)``, so the last chunk overlaps the one before it where c does not divide N.
``body(*chunks, *whole[, valid])`` returns one tensor for each of ``specs``:

    ("stack", shape, dtype): rows of an output ``[N, ...]``; repeated rows are written twice, alike.
    ("sum", shape, dtype):   a partial sum. ``valid``, a bool ``[c]`` that is passed where c does
                             not divide N, tells the rows that no earlier chunk has summed.

The op is cacheable, unlike ``while_loop``: FxGraphCache and AOTAutogradCache take graphs that hold
it (checked with torch 2.13). lower.py turns it into an in-place ``while_loop`` after both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.utils import autograd_not_implemented
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

STACK, SUM = "stack", "sum"
OutputSpec = tuple[str, tuple[int, ...], torch.dtype]


class MstLoop(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("mst_loop", cacheable=True)

    def __call__(
        self,
        body: Callable[..., Any],
        num_chunks: int,
        chunk_tokens: int,
        num_tokens: int,
        specs: tuple[OutputSpec, ...],
        sliced: tuple[torch.Tensor, ...],
        whole: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = super().__call__(
            body, num_chunks, chunk_tokens, num_tokens, specs, sliced, whole
        )
        return result


mst_loop = MstLoop()
mst_loop.py_autograd_impl(autograd_not_implemented(mst_loop, deferred_error=True))


@mst_loop.py_impl(FakeTensorMode)
def _fake(
    mode: FakeTensorMode,
    body: Any,
    num_chunks: int,
    chunk_tokens: int,
    num_tokens: int,
    specs: tuple[OutputSpec, ...],
    sliced: tuple[torch.Tensor, ...],
    whole: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    device = (*sliced, *whole)[0].device
    with mode:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in specs)


@mst_loop.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def run_eagerly(
    body: Callable[..., Any],
    num_chunks: int,
    chunk_tokens: int,
    num_tokens: int,
    specs: tuple[OutputSpec, ...],
    sliced: tuple[torch.Tensor, ...],
    whole: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """The loop as its definition says; what backends without Inductor's lowering run."""
    device = (*sliced, *whole)[0].device
    results = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype in specs]
    ragged = num_chunks * chunk_tokens != num_tokens
    for i in range(num_chunks):
        start = min(i * chunk_tokens, num_tokens - chunk_tokens)
        chunks = [tensor.narrow(0, start, chunk_tokens) for tensor in sliced]
        rows = torch.arange(start, start + chunk_tokens, device=device)
        valid = (rows >= i * chunk_tokens,) if ragged else ()
        parts = body(*chunks, *whole, *valid)
        for (kind, _, _), result, part in zip(specs, results, parts, strict=True):
            if kind == STACK:
                result.narrow(0, start, chunk_tokens).copy_(part)
            else:
                result.add_(part)
    return tuple(results)
