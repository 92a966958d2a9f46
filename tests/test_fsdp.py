"""FSDP2 on two ranks and on four: gradients, peaks, and how often weights are gathered."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.launch import Found, run_ranks
from tests.ranks.steps import kinds

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)
# how often the weights of the root, which has the head, and those of the two blocks are gathered
GATHERS = {
    "whole": 1 + 2 * 2,
    "by_block": 1 + 2 * 2,
    "kept": 1 + 2,
    "offloaded": 1 + 2 * 2,
    "accumulated": 2 * (1 + 2 * 2),
    "checkpointed": 1 + 2 * 2,
    "lora": 1 + 2 * 2,
    "head_and_loss_of_their_own": 1 + 1 + 2 * 2,
}
LENGTHS = ("lengths", "symbolic_lengths")


@pytest.fixture(scope="module")
def found() -> Found:
    return run_ranks("fsdp", [*GATHERS, "mixed", "head_of_its_own"])


@pytest.fixture(scope="module")
def of_lengths() -> Found:
    return run_ranks("fsdp", [*LENGTHS])


@pytest.mark.parametrize("case", GATHERS)
def test_gradients_are_those_of_eager_and_the_head_runs_in_chunks(found: Found, case: str) -> None:
    for result in found[case]:
        assert result["error"] < 1e-5
        assert "lm_head" in kinds(result["reports"])
        eager, ours = result["peaks"]
        assert ours < 0.5 * eager


@pytest.mark.parametrize(("case", "gathers"), GATHERS.items())
def test_weights_are_gathered_as_often_as_in_eager_mode(
    found: Found, case: str, gathers: int
) -> None:
    assert all(result["gathers"] == [gathers, gathers] for result in found[case])


def test_mixed_precision_is_as_exact_as_eager(found: Found) -> None:
    for result in found["mixed"]:
        assert result["error"] < 1.2 * result["eager"]
        assert "lm_head" in kinds(result["reports"])


def test_a_head_that_is_wrapped_without_its_loss_is_refused_with_both_sides(found: Found) -> None:
    for result in found["head_of_its_own"]:
        assert result["error"] < 1e-5
        assert "lm_head" not in kinds(result["reports"])
        rejections = [r for report in result["reports"] for r in report["rejections"]]
        fixes = [fix for _, why, fix in rejections if "logits are an input of the graph" in why]
        assert fixes and all("one module that FSDP2 wraps hold the head" in fix for fix in fixes)


@pytest.mark.parametrize("case", LENGTHS)
def test_ranks_of_different_length_do_not_wait_for_each_other(of_lengths: Found, case: str) -> None:
    for result in of_lengths[case]:
        assert result["error"] < 1e-5
        assert "lm_head" in kinds(result["reports"])


def test_symbolic_lengths_compile_in_the_first_step_alone(of_lengths: Found) -> None:
    for result in of_lengths["symbolic_lengths"]:
        assert all(result["graphs"][:1]) and not any(result["graphs"][1:])


@pytest.mark.full
def test_shards_on_two_ranks_replicated_twice() -> None:
    for result in run_ranks("fsdp", ["hybrid"], ranks=4)["hybrid"]:
        assert result["error"] < 1e-5
        assert "lm_head" in kinds(result["reports"])


@pytest.mark.full
@pytest.mark.parametrize("case", ["checkpointed", "peft"])
def test_hugging_face(case: str) -> None:
    pytest.importorskip("transformers" if case == "checkpointed" else "peft")
    for result in run_ranks("huggingface", [case])[case]:
        assert result["error"] < 1e-5
        assert "lm_head" in kinds(result["reports"])
        eager, ours = result["peaks"]
        assert ours < 0.6 * eager
