"""The GPUs that are known by name."""

from __future__ import annotations

import pytest
import torch

from mstpass.errors import UserError
from mstpass.gpus import DEFAULT, GPUS, TF32, gpu, gpu_like


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_sizes_and_speeds_of_its_kind(name: str) -> None:
    kind = gpu(name)
    assert gpu(f" {name.upper()} ") is kind
    assert 14 * 2**30 < kind.memory_bytes < 300 * 2**30
    assert 48 * 2**10 < kind.shared_memory_per_block_bytes < 228 * 2**10
    assert 3e5 <= kind.memory_bytes_per_us <= 8e6, "300 GB/s to 8 TB/s"
    fp8, half, full = (
        kind.flops_per_us.get(dtype)
        for dtype in (torch.float8_e4m3fn, torch.float16, torch.float32)
    )
    assert full is not None and half is not None and 8e6 <= full < half
    # dense figures: those of fp8 are twice those of half precision, those of TF32 at most half
    assert fp8 is None or fp8 == pytest.approx(2 * half, rel=0.03)
    assert kind.flops_per_us.get(TF32, 0) <= 0.51 * half
    assert (torch.bfloat16 in kind.flops_per_us) == (kind.capability >= (8, 0))
    assert (fp8 is not None) == (kind.capability >= (8, 9))
    assert kind.source.startswith("https://")


@pytest.mark.parametrize(
    ("wrong", "near"), [("h10", "h100"), ("H100PCIE", "h100-pcie"), ("RTX 4090 Ti", "4090")]
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=f"did you mean '{near}'.*Known are: h100, h100-pcie"):
        gpu(wrong)
    with pytest.raises(UserError, match="Known are"):
        gpu("")


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_is_found_by_its_own_full_name(name: str) -> None:
    assert gpu_like(GPUS[name].full_name, GPUS[name].capability) is GPUS[name]


@pytest.mark.parametrize(
    ("full_name", "capability", "name"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), "h100"),
        ("NVIDIA A100-PCIE-40GB", (8, 0), "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", (8, 0), "a100"),
        ("Tesla V100-SXM2-16GB", (7, 0), "v100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), "4090"),
        ("NVIDIA GeForce RTX 3080", (8, 6), "3090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "5090"),
        ("something new", (11, 0), None),
    ],
)
def test_a_real_device_is_of_the_likest_kind(
    full_name: str, capability: tuple[int, int], name: str | None
) -> None:
    found = gpu_like(full_name, capability)
    assert (found and found.name) == name


def test_a_part_of_a_gpu_is_slower_in_proportion() -> None:
    whole = gpu(DEFAULT)
    half = whole.with_multiprocessors(66)
    assert half.flops_per_us[torch.bfloat16] == whole.flops_per_us[torch.bfloat16] / 2
    assert half.memory_bytes_per_us == whole.memory_bytes_per_us / 2
    assert whole.with_multiprocessors(132) is whole
