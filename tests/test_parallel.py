"""Models that two processes share: tensor, sequence and context parallel, and sharded heads.

The processes are real and exchange data by gloo (tests/ranks/launch.py).
"""

from __future__ import annotations

import pytest
import torch

from tests.checks import compiles_kernels, rms
from tests.ranks.launch import Found, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]
IN_BFLOAT16 = {"sharded head, bfloat16": "fused", "sharded head, sections, bfloat16": "mixed"}
SHORT = ("token rules", "sharded head", "sharded head, sections", "plans apart")
LONG = (
    *IN_BFLOAT16,
    "tensor parallel",
    "own loss",
    "tensor parallel, least memory",
    "sequence parallel",
    "checkpointed",
    "sharded head, sum",
    "sharded head, none",
    "Ulysses",
    "pipeline",
    "gathered keys",
)
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def found() -> Found:
    return run_ranks("parallel_cases", SHORT)


def test_token_rules_of_collectives(found: Found) -> None:
    for each in found["token rules"]:
        assert len(each["taken"]) == 6 and all(each["taken"].values())


def test_a_sharded_head_runs_in_chunks(found: Found) -> None:
    for each in found["sharded head"]:
        assert each["error"] < TOLERANCE
        (region,) = each["regions"]  # either holds one chunk beside the gradients
        assert region in (["lm_head", "mixed", 3], ["lm_head", "fused", 2]), each["rejections"]


def test_the_backward_of_a_sharded_head_runs_in_sections_of_its_share(found: Found) -> None:
    for each in found["sharded head, sections"]:
        assert each["error"] < TOLERANCE
        assert each["regions"] == [["lm_head", "mixed", 3]], each["rejections"]


def _in_bfloat16_it_is_as_exact_as_eager(found: Found, case: str) -> None:
    for each in found[case]:
        ours, eager = each["errors"], each["eager_errors"]
        assert rms(ours) <= 1.1 * rms(eager) + 1e-5, (ours, eager)
        assert all(a <= 2 * b + 1e-3 for a, b in zip(ours, eager, strict=True)), (ours, eager)
        ((kind, mode, _),) = each["regions"]
        assert (kind, mode) == ("lm_head", IN_BFLOAT16[case]), each["rejections"]


def test_a_sharded_head_needs_hardly_more_than_its_floor(found: Found) -> None:
    """Its share of the weight's gradient, the input's gradient, and one chunk of its logits."""
    tokens, width, vocabulary = 512, 64, 4096
    floor = 4 * (vocabulary // 2 * width + tokens * width + 64 * vocabulary // 2)
    for each in found["sharded head"]:
        simulated = each["simulated"][0]
        assert 0.95 * floor <= simulated <= 1.1 * floor
        if compiles_kernels():
            assert floor <= each["peak"] <= 1.1 * floor
            assert simulated == pytest.approx(each["peak"], rel=0.05)


def test_ranks_with_different_plans_and_shards_do_not_wait_for_each_other(found: Found) -> None:
    chunked, whole = found["plans apart"]
    assert chunked["regions"] == [["lm_head", "fused", 2]] and whole["regions"] == []
    assert max(chunked["error"], whole["error"]) < TOLERANCE


@pytest.mark.full
def test_other_ways_to_share_a_model() -> (
    None
):  # examples/tensor_parallel.py is one that always runs
    found = run_ranks("parallel_cases", LONG)
    assert len(found["tensor parallel"][0]["regions"]) == 2
    for case in IN_BFLOAT16:
        _in_bfloat16_it_is_as_exact_as_eager(found, case)
    for case in set(LONG) - IN_BFLOAT16.keys():
        for each in found[case]:
            assert each["error"] < TOLERANCE, case
            assert each["regions"], (case, each["rejections"])
            assert "torch" not in each["solvers"], (case, each["notes"])
