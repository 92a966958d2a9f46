"""Backward runs collectives again where all ranks are known to do so, and only there."""

from __future__ import annotations

import pytest
import torch

from tests.ranks.launch import Found, run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]


@pytest.fixture(scope="module")
def found() -> Found:
    return run_ranks("repeats", ["alike", "off"])


@pytest.fixture(scope="module")
def found_apart() -> Found:
    return run_ranks("repeats", ["apart", "alone"])


def test_the_gradients_are_those_of_eager_mode(found: Found) -> None:
    assert max(rank["error"] for ranks in found.values() for rank in ranks) < 2e-6


def test_ranks_that_compile_alike_exchange_again(found: Found) -> None:
    first, second = found["alike"]
    assert first["repeated"] == second["repeated"] > 0 and first["order"] == second["order"]
    assert not first["notes"] and not second["notes"]
    for alike, off in zip(found["alike"], found["off"], strict=True):
        assert off["repeated"] == 0
        assert alike["simulated"] < 0.9 * off["simulated"]


@pytest.mark.full
def test_gradients_of_ranks_apart_are_those_of_eager_mode(found_apart: Found) -> None:
    assert max(rank["error"] for ranks in found_apart.values() for rank in ranks) < 2e-6


@pytest.mark.full
def test_a_rank_of_another_plan_has_all_repeat_nothing(found_apart: Found) -> None:
    first, second = found_apart["apart"]
    assert first["repeated"] == second["repeated"] == 0
    (note,) = first["notes"]
    assert "rank 1 has another plan than rank 0" in note
    assert not second["notes"], "it would not have repeated any"


@pytest.mark.full
def test_a_rank_that_compiles_alone_does_not_wait_for_ever(found_apart: Found) -> None:
    first, _ = found_apart["alone"]
    assert first["repeated"] == 0
    (note,) = first["notes"]
    assert "rank 1 did not compile together with rank 0" in note
