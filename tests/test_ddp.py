"""DDP on two ranks: right gradients, the head in chunks, and what a bucket's split costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.launch import Found, run_ranks
from tests.ranks.steps import kinds

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)
COMPILED = ("outside", "inside", "in_place", "whole", "python_reducer", "overlap")
PARTS = {"outside": 3, "inside": 3, "in_place": 3, "whole": 1, "loss_outside": 3}


@pytest.fixture(scope="module")
def found() -> Found:
    return run_ranks("ddp", [*COMPILED, "loss_outside"])


@pytest.mark.parametrize("case", [*COMPILED, "loss_outside"])
def test_gradients_are_those_of_eager_ddp(found: Found, case: str) -> None:
    assert all(result["error"] < 1e-5 for result in found[case])


@pytest.mark.parametrize("case", COMPILED[:-1])
def test_the_head_runs_in_chunks(found: Found, case: str) -> None:
    assert all("lm_head" in kinds(result["reports"]) for result in found[case])


@pytest.mark.parametrize(("case", "parts"), PARTS.items())
def test_reports_say_which_part_of_a_split_graph_they_are_of(
    found: Found, case: str, parts: int
) -> None:
    notes = [note for report in found[case][0]["reports"] for note in report["notes"]]
    expected = [f"this is part {k} of {parts}" for k in range(1, parts + 1)] if parts > 1 else []
    assert len(notes) == len(expected)
    assert all(words in note for words, note in zip(expected, notes, strict=True))
    assert all("optimize_ddp = False" in note for note in notes)


def test_a_report_names_the_bytes_that_a_split_keeps(found: Found) -> None:
    first, second, third = _notes(found, "outside")
    assert "from the parts before it" not in first
    # the input of the MLP's second product (1024 x 768), and the block's (1024 x 128)
    assert "2 values (3.5 MiB) from the parts before it stay in memory" in second
    assert "1 value (512.0 KiB) from the parts before it" in third


def test_an_mlp_that_a_bucket_cuts_is_refused_with_both_sides(found: Found) -> None:
    (reason, fix) = _refusal(found, "outside", "mlp", "DDP")
    assert "a bucket of DDP ends the graph inside of this part of the model" in reason
    assert "larger bucket_cap_mb" in fix and "optimize_ddp = False" in fix


def test_a_loss_outside_of_ddp_is_refused_with_both_sides(found: Found) -> None:
    assert not any(kinds(result["reports"]) for result in found["loss_outside"])
    reason, fix = _refusal(found, "loss_outside", "head", "output")
    assert "logits are an output of the graph" in reason
    assert "let the module that DDP wraps compute the loss" in fix
    reason, fix = _refusal(found, "loss_outside", "", "input of the graph")
    assert "logits are an input" in reason and "where DDP or FSDP2 wraps the model" in fix


def test_the_python_reducer_compiles_the_backward(found: Found) -> None:
    assert all(result["backwards"] == 1 for result in found["python_reducer"])


def test_the_heads_gradient_is_reduced_while_backward_goes_on(found: Found) -> None:
    for result in found["overlap"]:
        events = result["events"]
        reduced = [i for i, event in enumerate(events) if event.startswith("reduce")]
        assert events[reduced[0]] == "reduce head.weight"
        assert reduced[0] < events.index("layers.1.mlp.down.weight") < reduced[-1]


@pytest.mark.full
def test_large_buckets_split_the_head_off() -> None:
    for result in run_ranks("ddp", ["large_buckets"])["large_buckets"]:
        assert result["error"] < 1e-5
        assert [len(report["regions"]) for report in result["reports"]] == [0, 1]


def _notes(found: Found, case: str) -> list[str]:
    return [note for report in found[case][0]["reports"] for note in report["notes"]]


def _refusal(found: Found, case: str, source: str, words: str) -> tuple[Any, Any]:
    rejections = [r for report in found[case][0]["reports"] for r in report["rejections"]]
    return next((why, fix) for at, why, fix in rejections if source in at and words in why)
