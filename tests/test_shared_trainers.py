"""Trainers whose ranks share each sequence: figures, steps and weights of one process.

The trainers of one process run here, in eager mode; those of the ranks are compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

import mstpass
from mstpass import TrainerError
from tests.ranks import shared_trainers
from tests.ranks.launch import run_ranks
from tests.ranks.sequences import model_of

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TOLERANCE = 1e-5
HAS_TRL = importlib.util.find_spec("trl") is not None


def _is_one_process(results: list[dict[str, Any]], build: Callable[[], Any]) -> None:
    """Compare every rank's weights and steps, and what the first logs, with one process."""
    torch.manual_seed(0)
    right = shared_trainers.trained(build())
    before = model_of("Llama").get_output_embeddings().weight
    assert not torch.allclose(torch.tensor(right["weights"][-before.numel() :]), before.flatten())
    for result in results:
        assert result["steps"] == right["steps"]
        assert result["weights"] == pytest.approx(right["weights"], rel=TOLERANCE, abs=TOLERANCE)
        assert result["graphs"] > 0
        assert len(result["logged"]) == len(right["logged"])
        for ours, theirs in zip(result["logged"], right["logged"], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.slow
def test_two_ranks() -> None:
    sft = ["sft_shared"] if HAS_TRL else []
    found = run_ranks("shared_trainers", ["trainer_shared", *sft, "refusals"])
    for refused in found["refusals"]:
        assert "documents or padding that need a mask" in refused["packed in a ring"]
        assert "prediction_loss_only=True" in refused["predictions"]
        assert "must hold each of 2 ranks once" in refused["groups"]
    for result in found["trainer_shared"]:
        assert result["said"].endswith("each sequence on 2 ranks")
    _is_one_process(found["trainer_shared"], shared_trainers.trainer)
    if sft:
        _is_one_process(found["sft_shared"], shared_trainers.sft)
