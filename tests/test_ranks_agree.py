"""Two ranks that compile take the same automatic budget: the least that any of them has left."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.agree import PATIENCE_S
from tests.ranks.launch import Found, run_ranks


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks() -> None:
    found = run_ranks("agree", ["least", "evaluation", "alone"])
    _all_plan_for_the_least(found)
    _a_rank_that_compiles_again_keeps_to_what_was_agreed(found)
    _ranks_of_different_length_agree(found)
    _a_rank_that_evaluates_alone_asks_nobody(found)
    _a_rank_whose_program_differs_goes_on_and_says_so(found)


def _all_plan_for_the_least(found: Found) -> None:
    first, second = found["least"]
    assert first["together"]["limits"] == second["together"]["limits"] != [None]


def _a_rank_that_compiles_again_keeps_to_what_was_agreed(found: Found) -> None:
    first, second = found["least"]
    assert first["again"]["limits"] not in ([], [None])
    assert second["again"]["limits"] == []


def _ranks_of_different_length_agree(found: Found) -> None:
    for rank in found["least"]:
        assert rank["other"]["limits"] not in ([], [None])
        assert not rank["other"]["warnings"]


def _a_rank_that_evaluates_alone_asks_nobody(found: Found) -> None:
    first, _ = found["evaluation"]
    assert not first["waits_s"] and not first["warnings"]


def _a_rank_whose_program_differs_goes_on_and_says_so(found: Found) -> None:
    first, second = found["alone"]
    (message,) = first["first"]["warnings"]
    assert "rank 1 did not compile together with rank 0" in message
    assert "memory_budget in bytes" in message
    assert first["first"]["limits"] == [None], "this rank has all that the step needs"
    assert second["second"]["limits"] != [None]
    assert first["first"]["waits_s"][0] > PATIENCE_S
    assert max(*first["second"]["waits_s"], *second["second"]["waits_s"]) < PATIENCE_S
