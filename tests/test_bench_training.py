"""`mstpass bench training`: what counts as a miss, and short runs that stop and go on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mstpass import stdlib_text
from mstpass.bench import training
from mstpass.bench.huggingface import sized
from mstpass.bench.training import OLMO2, Curves, Job, Run, Setup, run_jobs
from mstpass.errors import UserError
from tests.checks import op_by_op

pytestmark = pytest.mark.sampled(1)

CPU = torch.device("cpu")
QUICK = ["--quick", "--device", "cpu"]


def run(*losses: float, weights: str = "w") -> Run:
    return Run(list(losses), weights, 2**20, "")


def curves(ours: Run, second: Run) -> Curves:
    eager = {0: run(3.0, 2.0, 1.0, 1.0), 1: run(3.2, 2.4, 1.4, 1.4)}
    return Curves("m", False, eager, {0.0: ours}, {0.0: (run(*ours.losses[:2]), second)})


def test_a_curve_is_held_to_the_spread_of_eager_s_seeds() -> None:
    setup = dataclasses.replace(training.QUICK, window=1)
    near = curves(run(3.0, 2.0, 1.0, 1.1), run(1.0, 1.1))
    (apart, bits) = training.result_of([near], setup).targets
    assert apart.value == pytest.approx(0.25) and apart.met and bits.met
    far = curves(run(3.0, 2.5, 1.0, 1.0), run(1.0, 1.0))
    (apart, bits) = training.result_of([far], setup).targets
    assert apart.value == pytest.approx(1.25) and not apart.met and bits.met


@pytest.mark.parametrize("second", [run(1.0, 1.1 + 1e-7), run(1.0, 1.1, weights="v")])
def test_a_bit_that_differs_is_told(second: Run) -> None:
    found = curves(run(3.0, 2.0, 1.0, 1.1), second)
    result = training.result_of([found], dataclasses.replace(training.QUICK, window=1))
    assert result.targets[1].value == 1 and not result.targets[1].met
    assert result.tables[0].rows[-1][-1] == "DIFFERENT"


def test_losses_are_smoothed() -> None:
    assert training.smooth([1.0, 2.0, 6.0, 1.0], 2) == [1.5, 4.0, 3.5]


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(UserError, match="'gpt5' is unknown; choose from: Llama; "):
        training.main([*QUICK, "--model", "gpt5"])


@pytest.mark.full
@pytest.mark.parametrize("autocast", [False, True])
def test_training_stopped_and_resumed(autocast: bool, tmp_path: Path) -> None:
    """A few steps of a post-norm model: eager's losses, and the same bits in two parts."""
    size = sized(32, 1, 96, 4096, 4, 128)
    setup = Setup(size, 4, 1, (0,), (0.0,), 0)
    pieces = stdlib_text.read_sources(2**15)
    stream_T = stdlib_text.encode(stdlib_text.train_tokenizer(pieces, 1024), pieces)
    with op_by_op():
        whole, first, second = (
            run_jobs(jobs, stream_T, CPU)
            for jobs in training.jobs_of(OLMO2, autocast, setup, str(tmp_path))
        )
    eager, ours = whole
    assert ours.losses == first[0].losses + second[0].losses and len(ours.losses) == 4
    assert ours.weights == second[0].weights != first[0].weights
    assert ours.losses == pytest.approx(eager.losses, rel=2e-2 if autocast else 1e-5)
    assert autocast or "lm_head" in ours.plan  # so few tokens may stay whole in bfloat16


@pytest.mark.full
def test_from_text_to_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = tmp_path / "t.json"
    assert training.main([*QUICK, "--json", str(found), "--plots", str(tmp_path)]) == 0
    (result,) = json.loads(found.read_text())["results"]
    assert [target["met"] for target in result["targets"]] == [True] * 8
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_process_that_fails_is_told(tmp_path: Path) -> None:
    job = Job("no such model", False, None, 0, training.QUICK.size, 2, 0, 2)
    with pytest.raises(UserError, match="no such model"):
        training.in_process([job], torch.arange(2), str(tmp_path), 0, CPU)
