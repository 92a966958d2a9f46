"""FSDP2 on two ranks and on four: gradients, peaks, and how often weights are gathered.

One test runs most cases in one group of processes: those would start, and compile, once for each
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
# how often the weights of the root, which has the head, and those of the two blocks are gathered
GATHERS = {
    "whole": 1 + 2 * 2,
    "by_block": 1 + 2 * 2,
    "resharded": 2 + 2 * 2,  # the root too
    "kept": 1 + 2,
    "offloaded": 1 + 2 * 2,
    "accumulated": 2 * (1 + 2 * 2),
    "head_and_loss_of_their_own": 1 + 1 + 2 * 2,
}
# what FSDP2 does with the weights differs, the graphs that it leaves do not
SAME_GRAPHS = ("resharded", "kept", "offloaded", "accumulated")
COMPILED = ("whole", "by_block", "head_and_loss_of_their_own")
HEAD_IN_CHUNKS = (*(case for case in GATHERS if case not in SAME_GRAPHS), "mixed")


def test_two_ranks() -> None:
    chunked = [*HEAD_IN_CHUNKS, "symbolic_lengths"]
    found = run_ranks("fsdp", [*chunked, "head_of_its_own", "explained"], kernels=COMPILED)
    for case, results in found.items():
        limits = [1.2 * r["eager"] if case == "mixed" else 1e-5 for r in results]
        assert [r["error"] < limit for r, limit in zip(results, limits, strict=True)] == [True] * 2
    for case in chunked:
        assert all("lm_head" in kinds(result["reports"]) for result in found[case]), case
    assert "lm_head" in kinds(found["explained"][0]["reports"])
    _weights_are_gathered_as_often_as_in_eager_mode(found)
    _a_head_that_is_wrapped_without_its_loss_is_refused_with_both_sides(found)
    for result in found["symbolic_lengths"]:
        assert result["graphs"][0] and not any(result["graphs"][1:]), "only the first step compiles"


@pytest.mark.full
def test_other_ways_to_hold_the_weights() -> None:
    found = run_ranks("fsdp", SAME_GRAPHS)
    for case, results in found.items():
        assert all(result["error"] < 1e-5 for result in results), case
        assert all("lm_head" in kinds(result["reports"]) for result in results), case
    _weights_are_gathered_as_often_as_in_eager_mode(found)


def _weights_are_gathered_as_often_as_in_eager_mode(found: Found) -> None:
    for case in found.keys() & GATHERS.keys():
        for result in found[case]:
            assert result["gathers"] == [GATHERS[case]] * 2, case
            eager, ours = result["peaks"]
            assert ours < 0.5 * eager, case


def _a_head_that_is_wrapped_without_its_loss_is_refused_with_both_sides(found: Found) -> None:
    for result in found["head_of_its_own"]:
        assert "lm_head" not in kinds(result["reports"])
        rejections = [r for report in result["reports"] for r in report["rejections"]]
        fixes = [fix for _, why, fix in rejections if "logits are an input of the graph" in why]
        assert fixes and all("FSDP2 wraps" in fix for fix in fixes)


@pytest.mark.full
def test_a_rank_may_compile_again_alone() -> None:
    results = run_ranks("fsdp", ["lengths"])["lengths"]
    for result in results:
        assert result["error"] < 1e-5
        assert "lm_head" in kinds(result["reports"])
    first, second = (result["graphs"][:3] for result in results)
    assert first[1] and not second[1], "only rank 0 has a new length in the second step"
    assert second[2] and not first[2], "only rank 1 has one in the third"


@pytest.mark.full
@pytest.mark.parametrize("case", ["checkpointed", "lora"])
def test_checkpointed_blocks_and_small_products_beside_frozen_weights(case: str) -> None:
    for result in run_ranks("fsdp", [case])[case]:
        assert result["error"] < 1e-5
        assert "lm_head" in kinds(result["reports"])
        assert result["gathers"] == [1 + 2 * 2] * 2
        assert result["peaks"][1] < 0.6 * result["peaks"][0]


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
