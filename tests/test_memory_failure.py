"""What an allocator's error says, and which budget follows from it."""

from __future__ import annotations

import pytest
import torch

from mstpass.memory.device_budget import Failure, failure_of, is_out_of_memory

CPU_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 100000 bytes."


@pytest.mark.parametrize(
    ("failure", "fits"),
    [
        (Failure(MemoryError, "", "forward"), 800),  # nobody knows how much was missing
        (Failure(MemoryError, "", "forward", requested_bytes=400), 600),
        (Failure(MemoryError, "", "forward", requested_bytes=1), 950),  # clearly less
        (Failure(MemoryError, "", "forward", requested_bytes=1000), None),
        (Failure(MemoryError, "", "backward", 400, free_bytes=600, used_bytes=900), 570),
        (Failure(MemoryError, "", "backward", 400, free_bytes=5000, used_bytes=900), 855),
        # 1.25 times the simulated peak: the next plan's measured peak may be so much higher, too
        (Failure(MemoryError, "", "backward", 400, free_bytes=1000, used_bytes=1250), 760),
    ],
)
def test_the_budget_that_fits(failure: Failure, fits: int | None) -> None:
    assert failure.fitting_bytes(1000) == fits
    assert failure.fitting_bytes(None) is None


def test_the_request_is_read() -> None:
    cpu = torch.device("cpu")
    for text, size in (
        (CPU_TEXT, 100_000),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...", 3 * 2**29),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU", 512),
        ("out", None),
    ):
        found = failure_of(torch.OutOfMemoryError(text), "forward", cpu)
        assert found.requested_bytes == size
    assert not is_out_of_memory(RuntimeError("a shape"))
    assert not is_out_of_memory(ValueError(CPU_TEXT))
