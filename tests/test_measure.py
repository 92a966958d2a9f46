"""Peaks equal allocations of known size; timings run in interleaved rounds."""

import pytest
import torch

from mstpass.measure import Timing, peak_bytes, timed

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
KIB = 1024
N = 256 * KIB  # floats: a tensor of 1 MiB


def floats(device, count=N):
    return torch.empty(count, dtype=torch.float32, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_peak_is_what_lives_at_once(device):
    def fn():
        a, b = floats(device), floats(device)
        del a, b
        return floats(device)

    assert peak_bytes(fn, device) == 2 * 4 * N


@pytest.mark.parametrize("device", DEVICES)
def test_what_lived_before_does_not_count(device):
    before = [floats(device) for _ in range(3)]
    assert peak_bytes(lambda: floats(device), device) == 4 * N
    assert len(before) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_left_behind_count(device):
    weight = floats(device).requires_grad_()

    def fn():
        weight.sum().backward()

    assert 4 * N <= peak_bytes(fn, device) <= 4 * N + 4 * KIB
    assert weight.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_that_only_frees_has_no_peak(device):
    held = [floats(device)]
    assert peak_bytes(held.clear, device) == 0


def test_the_profiler_s_memory_of_earlier_calls_does_not_count():
    """It knows blocks of earlier profiles, and never forgets those freed between two."""
    kept = []
    for _ in range(3):  # the second call frees what the first one allocated
        assert peak_bytes(lambda: (kept.clear(), kept.append(floats("cpu")))) == 4 * N
    kept.clear()  # not seen by the profiler: the address may be used again for another size
    assert peak_bytes(lambda: [floats("cpu", N // 2), floats("cpu", N // 2)]) == 4 * N


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_without_tensors_has_no_peak(device):
    assert peak_bytes(lambda: None, device) == 0


def test_an_error_in_the_call_reaches_the_caller_and_leaves_the_profiler_usable():
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(lambda: floats("cpu")) == 4 * N


def test_nothing_on_stderr(capfd):
    peak_bytes(lambda: floats("cpu"))
    assert capfd.readouterr().err == ""


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="meta"):
        peak_bytes(lambda: None, "meta")


def test_rounds_are_interleaved_after_the_warmup():
    calls = []
    timings = timed({k: lambda k=k: calls.append(k) for k in "ab"}, repeats=3, warmup=2)
    assert "".join(calls) == "aabb" + "ababab"
    assert {k: len(t.seconds) for k, t in timings.items()} == {"a": 3, "b": 3}


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="repeats"):
        timed({}, repeats=0)


def test_ratio_is_the_median_over_rounds():
    slow, fast = Timing((2.0, 9.0, 4.0)), Timing((1.0, 3.0, 4.0))
    assert slow.ratio_to(fast) == 2.0
    assert slow.median_s == 4.0
    assert slow.min_s == 2.0
