"""Peaks that the fuzzer found above those of Inductor alone, or below what is measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.checks import INDUCTOR, check_case
from mstpass.limit import MEASURED_OVER_SIMULATED

pytestmark = pytest.mark.sampled(2)

SLICED = Case(
    (Layer(act="silu"),),
    head="norm_after",
    shift="logits",
    loss="neighbours",
    batch=3,
    length=200,
    vocabulary=499,
    chunk_tokens=100,
    forced=False,
)
CASES = {
    # Up to torch 2.14 nothing was donated to a backward with loops: logits were not overwritten.
    "a backward with loops overwrites what is saved": SLICED,
    # The kernel that picks the labels' logits is in the loop over rows of the softmax, which was
    # thought to be written over the logits.
    "a gather in the loop over the rows": Case(
        head="frozen", loss="per_token", batch=3, length=131, vocabulary=499, memory_budget=0.8
    ),
    # Sums of fewer than eight elements are pointwise ops, which are computed once more by readers.
    "reductions that are unrolled": Case(
        logit_ops=("token_softmax",), batch=7, length=5, vocabulary=600
    ),
    # A norm was recomputed with its own backward, so that a weight's gradient was computed last.
    "a weight's gradient before the backward of its operand": Case(
        source="two",
        final_norm="layer_plain",
        head="by_hand",
        loss="sine_sum",
        batch=7,
        length=1,
        vocabulary=128,
        chunk_tokens=3,
    ),
    # Inputs count among what a kernel reads, and each place where it reads a buffer.
    "a value that reads five others": Case(
        logit_ops=("shift",), shift="first", head="bias", batch=1, length=96, vocabulary=600
    ),
    # The logarithms of the sums of rows have kernels over rows alone, and no exponential is local.
    "softmaxes behind logarithms of rows": Case(
        loss="r_drop", batch=3, length=96, vocabulary=601, memory_budget=0.2, forced=False
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_simulated_and_the_measured_peak_agree(case: Case) -> None:
    if case is CASES["reductions that are unrolled"] and torch.__version__ < "2.13":
        pytest.skip("what is read more often than that is written to memory up to torch 2.12")
    checked = check_case(case, INDUCTOR)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))
    assert checked.peaks is not None
    simulated, _, measured = checked.peaks
    ratio = measured / simulated
    assert 1 / MEASURED_OVER_SIMULATED < ratio < MEASURED_OVER_SIMULATED, checked.peaks


def test_the_schedule_counts_chunks_of_symbolic_length_by_the_batch() -> None:
    """The greatest length of a chunk was taken for that of each; the batch ends a range."""
    case = Case(shift="first", loss="top_margin", batch=1, length=1024, vocabulary=600)
    case = dataclasses.replace(case, dynamic="both", forced=False, solver="recompute_all")
    checked = check_case(case, INDUCTOR)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))
    assert checked.peaks is not None and checked.facts["lm_head fused symbolic"] == 1
    _, scheduled, measured = checked.peaks
    ratio = measured / scheduled
    assert 1 / MEASURED_OVER_SIMULATED < ratio < MEASURED_OVER_SIMULATED, checked.peaks
