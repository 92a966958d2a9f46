"""The ops that write products into the buffers of a loop."""

from __future__ import annotations

import pytest
import torch

from mstpass.graph.buffer_ops import add_product_, counter
from tests.conftest import CUDA


@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_chunk_overwrites_and_others_add(
    batch: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    left = torch.randn(*batch, 4, 16, device=device).to(dtype)
    right = torch.randn(*batch, 16, 5, device=device).to(dtype)
    exact = left.double() @ right.double()
    total = torch.full((*batch, 4, 5), torch.nan, device=device)  # never filled, as a buffer is
    add_product_(total, left, right, 0)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
    add_product_(total, left, right, 7)
    torch.testing.assert_close(total.double(), 2 * exact, rtol=1e-5, atol=1e-5)


def test_a_product_is_written_into_rows_of_a_buffer() -> None:
    buffer = torch.full((6, 5), torch.nan)
    left, right = torch.randn(2, 3), torch.randn(3, 5)
    add_product_(buffer[2:4], left, right, 0)
    torch.testing.assert_close(buffer[2:4], left @ right)
    assert buffer[:2].isnan().all() and buffer[4:].isnan().all()


def test_the_counter_is_on_the_cpu() -> None:
    value = counter(3)
    assert value.device.type == "cpu" and value.dtype == torch.int64 and value.item() == 3
