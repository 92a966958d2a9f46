"""DDP on two ranks: right gradients, the head in chunks, and what a bucket's split costs.

One test runs all cases in one group of processes: those would start, and compile, once for each
worker that runs a test of its own.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks.launch import Found, run_ranks
from tests.ranks.steps import kinds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]
COMPILED = ("outside", "whole", "python_reducer", "overlap")
OTHERS = ("inside", "in_place")
PARTS = {"outside": 3, "inside": 3, "in_place": 3, "whole": 1, "loss_outside": 3}


def test_two_ranks() -> None:
    found = run_ranks("ddp", [*COMPILED, "loss_outside"])
    for case, results in found.items():
        assert all(result["error"] < 1e-5 for result in results), case
    for case in COMPILED[:-1]:
        assert all("lm_head" in kinds(result["reports"]) for result in found[case]), case
    assert all(result["backwards"] == 1 for result in found["python_reducer"])
    _reports_say_which_part_of_a_split_graph_they_are_of(found)
    _a_report_names_the_bytes_that_a_split_keeps(found)
    _an_mlp_that_a_bucket_cuts_is_refused_with_both_sides(found)
    _a_loss_outside_of_ddp_is_refused_with_both_sides(found)
    _the_heads_gradient_is_reduced_while_backward_goes_on(found)


def _reports_say_which_part_of_a_split_graph_they_are_of(found: Found) -> None:
    for case in found.keys() & PARTS.keys():
        parts = PARTS[case]
        expected = [f"this is part {k} of {parts}" for k in range(1, parts + 1)] * (parts > 1)
        notes = _notes(found, case)
        assert len(notes) == len(expected)
        assert all(words in note for words, note in zip(expected, notes, strict=True))
        assert all("optimize_ddp = False" in note for note in notes)


def _a_report_names_the_bytes_that_a_split_keeps(found: Found) -> None:
    first, second, third = _notes(found, "outside")
    assert "from the parts before it" not in first
    # the input of the MLP's second product (1024 x 768), and the block's (1024 x 128)
    assert "2 values (3.5 MiB) from the parts before it stay in memory" in second
    assert "1 value (512.0 KiB) from the parts before it" in third


def _an_mlp_that_a_bucket_cuts_is_refused_with_both_sides(found: Found) -> None:
    reason, fix = _refusal(found, "outside", "mlp", "DDP")
    assert "a bucket of DDP ends the graph inside of this part of the model" in reason
    assert "larger bucket_cap_mb" in fix and "optimize_ddp = False" in fix


def _a_loss_outside_of_ddp_is_refused_with_both_sides(found: Found) -> None:
    assert not any(kinds(result["reports"]) for result in found["loss_outside"])
    _, fix = _refusal(found, "loss_outside", "head", "logits are an output of the graph")
    assert "let the module that DDP wraps compute the loss" in fix
    _, fix = _refusal(found, "loss_outside", "", "logits are an input of the graph")
    assert "where DDP or FSDP2 wraps the model" in fix


def _the_heads_gradient_is_reduced_while_backward_goes_on(found: Found) -> None:
    for result in found["overlap"]:
        events = result["events"]
        reduced = [i for i, event in enumerate(events) if event.startswith("reduce")]
        assert events[reduced[0]] == "reduce head.weight"
        assert reduced[0] < events.index("layers.1.mlp.down.weight") < reduced[-1]


@pytest.mark.full
def test_other_places_of_the_wrapper() -> None:
    found = run_ranks("ddp", OTHERS)
    for case, results in found.items():
        assert all(result["error"] < 1e-5 for result in results), case
        assert all("lm_head" in kinds(result["reports"]) for result in results), case
    _reports_say_which_part_of_a_split_graph_they_are_of(found)


@pytest.mark.full
def test_large_buckets_split_the_head_off() -> None:
    for result in run_ranks("ddp", ["large_buckets"])["large_buckets"]:
        assert result["error"] < 1e-5
        assert [len(report["regions"]) for report in result["reports"]] == [0, 1]


def _notes(found: Found, case: str) -> list[str]:
    return [note for report in found[case][0]["reports"] for note in report["notes"]]


def _refusal(found: Found, case: str, source: str, words: str) -> tuple[str, str]:
    """The reason and the advice of a refusal."""
    rejections = [r for report in found[case][0]["reports"] for r in report["rejections"]]
    return next((why, fix) for at, why, fix in rejections if source in at and words in why)
