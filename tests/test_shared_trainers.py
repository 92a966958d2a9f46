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


@pytest.mark.full
@pytest.mark.parametrize("case", ["each_ranks_mean", "packed", "encoder", "ring", "sft_packed"])
def test_other_batches_and_models(case: str) -> None:
    if case.startswith("sft"):
        pytest.importorskip("trl")
    found = run_ranks("shared_trainers", [f"{case}_shared"])
    build = "trainer" if case == "ring" else case
    _is_one_process(found[f"{case}_shared"], getattr(shared_trainers, build))


@pytest.mark.full
def test_two_sequences_of_two_ranks() -> None:
    """Two rows on each pair of ranks are four in one process."""
    found = run_ranks("shared_trainers", ["of_a_mesh"], ranks=4)["of_a_mesh"]
    assert found[0]["said"].endswith("2 sequences at a time, each on 2 ranks")
    wide = {f"per_device_{when}_batch_size": 4 for when in ("train", "eval")}
    _is_one_process(found, lambda: shared_trainers.in_order(**wide))


@pytest.mark.full
def test_a_mesh_of_two_dims_shares_each_sequence() -> None:
    found = run_ranks("shared_trainers", ["ring_of_rows"], ranks=4)["ring_of_rows"]
    assert found[0]["said"].endswith("each sequence on 4 ranks")
    _is_one_process(found, shared_trainers.trainer)


# ---- what is refused, in one process -------------------------------------------------------------
def _refusal(built: Any, **how: Any) -> str:
    with pytest.raises(TrainerError) as found:
        mstpass.compile_trainer(built, **{"sequence_parallel": True, **how})
    return str(found.value)


def test_losses_of_whole_sequences_are_refused() -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.mean()

    class Own(shared_trainers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    smoothed = shared_trainers.trainer(label_smoothing_factor=0.1)
    assert "sequence_parallel and label_smoothing_factor: it reads" in _refusal(smoothed)
    built = shared_trainers.trainer()
    built.compute_loss_func = loss
    assert "sequence_parallel and compute_loss_func: it reads" in _refusal(built)
    built = shared_trainers.trainer()
    built.__class__ = Own
    said = _refusal(built)
    assert "sequence_parallel and Own.compute_loss: it reads" in said
    assert "mstpass.shard_sequence" in said


@pytest.mark.parametrize("kind", ["DPOTrainer", "GRPOTrainer", "RewardTrainer"])
def test_losses_of_trl_s_other_trainers_are_refused(kind: str) -> None:
    trl = pytest.importorskip("trl")
    built = shared_trainers.trainer()
    built.__class__ = getattr(trl, kind)
    assert f"sequence_parallel and {kind}.compute_loss: it reads" in _refusal(built)


def test_settings_that_do_not_fit_are_refused() -> None:
    built = shared_trainers.trainer()
    built.compute_metrics = dict
    assert "sequence_parallel and compute_metrics: metrics read logits" in _refusal(built)
    counts = shared_trainers.trainer(include_num_input_tokens_seen=True)
    assert "include_num_input_tokens_seen: the trainer would count" in _refusal(counts)
    built = shared_trainers.trainer()
    built.model._tp_size = 2
    assert "ParallelismConfig(tp_size): both divide" in _refusal(built)
    built = shared_trainers.trainer()
    built.is_deepspeed_enabled = True
    assert "sequence_parallel and DeepSpeed: its engine has an Ulysses" in _refusal(built)
    built = shared_trainers.trainer()
    built.accelerator.dataloader_config.dispatch_batches = True
    assert "sequence_parallel and dispatch_batches=True: one process" in _refusal(built)
    built = shared_trainers.trainer()
    built.aux_loss_enabled = True
    assert "router_aux_loss_coef: a load-balancing loss" in _refusal(built)
    bert = shared_trainers.trainer(model="Bert MaskedLM")
    assert "BertForMaskedLM: the model averages its loss" in _refusal(bert)
    assert "runs in one process: start it with torchrun" in _refusal(shared_trainers.trainer())
    alone = _refusal(shared_trainers.trainer(), sequence_parallel=False, method="ring")
    assert "sequence_parallel is not given" in alone
