"""Attention of rows of queries: results and gradients of chunks are those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mstpass.graph.attention_rows import (
    add_attend_rows_backward_,
    attend_rows,
    attend_rows_backward,
)

WIDTH = 16


class Case:
    """Attention of random values, and which keys each query sees."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
        heads: int = 4,
        key_heads: int = 4,
        queries: int = 96,
        keys: int | None = None,
        causal: bool = True,
    ):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        keys = queries if keys is None else keys
        self.query, self.grad = (random(batch, heads, queries, WIDTH) for _ in range(2))
        self.key, self.value = (random(batch, key_heads, keys, WIDTH) for _ in range(2))
        self.causal, self.queries = causal, queries
        row, column = torch.arange(queries)[:, None], torch.arange(keys)
        seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
        if causal:
            seen &= column <= row
        self.seen = seen

    def whole(self, dtype: torch.dtype) -> list[Tensor]:
        """The result and the gradients in this dtype."""
        q, k, v = (x.to(dtype).requires_grad_() for x in (self.query, self.key, self.value))
        group = q.shape[1] // k.shape[1]
        repeated = (x.repeat_interleave(group, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, *repeated, attn_mask=self.seen.expand(-1, q.shape[1], -1, -1)
        )
        return [out, *torch.autograd.grad(out, (q, k, v), self.grad.to(dtype))]

    def in_chunks(self, length: int, in_place: bool = False) -> list[Tensor]:
        rows_first = [x.transpose(1, 2).flatten(0, 1) for x in (self.query, self.grad)]
        outs, of_queries = [], []
        of_key, of_value = (
            torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (self.key, self.value)
        )
        total = len(rows_first[0])
        for first in range(0, total, length):
            start = max(0, min(first, total - length))
            q, grad = (x[start : start + length].transpose(0, 1)[None] for x in rows_first)
            how = (start, self.queries, self.causal, WIDTH**-0.5)
            out, log_sum = attend_rows(q, self.key, self.value, *how, in_place)
            saved = grad, q, self.key, self.value, out, log_sum
            how = (*how, True)
            if in_place:
                of_query = add_attend_rows_backward_(of_key, of_value, *saved, *how)
            else:
                of_query, more_keys, more_values = attend_rows_backward(*saved, *how)
                of_key += more_keys
                of_value += more_values
            new = first - start
            outs.append(out[0].transpose(0, 1)[new:])
            of_queries.append(of_query[0].transpose(0, 1)[new:])
        by_row = [torch.cat(x).unflatten(0, (-1, self.queries)) for x in (outs, of_queries)]
        out, of_query = (x.transpose(1, 2) for x in by_row)
        return [out, of_query, of_key, of_value]


CASES = {
    "causal": {},
    "grouped": {"key_heads": 2},
    "one head of keys": {"key_heads": 1, "queries": 100},
    "sequences": {"batch": 3, "key_heads": 2, "queries": 50},
    "full": {"causal": False},
    "other keys": {"causal": False, "keys": 37, "key_heads": 2, "batch": 2},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_chunks_give_what_the_whole_gives(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstpass.graph.attention_rows.KEYS", 24)
    monkeypatch.setattr("mstpass.graph.attention_rows.KEYS_OF_ROW", 0)
    case = Case(dtype, **CASES[name])
    exact, eager = case.whole(torch.float64), case.whole(dtype)
    floor = 1e-10 if dtype == torch.float64 else 3e-6
    for length in (96, 32, 17):
        for in_place in (False, True):
            for ours, theirs, right in zip(
                case.in_chunks(length, in_place), eager, exact, strict=True
            ):
                error, known = (((x - right).norm() / right.norm()).item() for x in (ours, theirs))
                # blocks of 24 keys: each is rounded to 16 bits before they are merged
                assert error <= 1.5 * known + floor


def test_keys_that_no_row_sees_are_not_read() -> None:
    case = Case(queries=64)
    case.key[:, :, 32:], case.value[:, :, 32:] = float("nan"), float("nan")
    out, _ = attend_rows(
        *(case.query[:, :, 16:32], case.key, case.value, 16, 64, True, WIDTH**-0.5, False)
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("op", [attend_rows, attend_rows_backward])
def test_fake_results_are_like_real_ones(op: torch._ops.OpOverload) -> None:
    case = Case(torch.bfloat16, key_heads=2)
    q = case.query[:, :, :32]
    how = (0, case.queries, True, WIDTH**-0.5)
    forward = (q, case.key, case.value, *how, True)
    if op is attend_rows_backward:
        saved = (case.grad[:, :, :32], *forward[:3], *attend_rows(*forward))
        forward = (*saved, *how, False)
    torch.library.opcheck(op, forward, test_utils=("test_schema", "test_faketensor"))
