"""What a report says of peaks, and of parts about which there is nothing to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mstpass
from mstpass.byte_sizes import bytes_text
from mstpass.graph import advice
from mstpass.plans import ChunkPlan, Outcome, Rejection
from mstpass.report.report import Report
from mstpass.report.store import summary

MIB = 2**20
ELSEWHERE = advice.LOWER_BUDGET("the step's peak lies elsewhere, so chunks here would not lower it")
TOO_FEW = advice.MORE_ROWS(
    "64 tokens are fewer than two chunks of 96 rows; shorter chunks would slow down products"
)
MIXES = advice.ROWWISE("aten.amax reduces over all tokens")
HEAD = ChunkPlan("lm_head", "fused", "head", 64, 16, 4, 9 * MIB, 3 * MIB, (), (), ())


def _report(*rejections: Rejection, regions: tuple[ChunkPlan, ...] = (HEAD,)) -> Report:
    peaks = {"peak_bytes": 100 * MIB, "baseline_peak_bytes": 300 * MIB, "extra_time": 0.01}
    return Report(Outcome(regions, tuple(rejections), **peaks))  # type: ignore


def _mlps(count: int, reason: str, size: int = 5 * MIB) -> list[Rejection]:
    return [
        Rejection("plan", f"mm_{i}", reason, f"model.layers.{i // 3}.mlp.{'abc'[i % 3]}", size)
        for i in range(count)
    ]


def _lines(report: Report, part: str) -> list[str]:
    return [line for line in str(report).splitlines() if part in line]


@pytest.mark.parametrize("scheduled_bytes", [None, 77 * MIB])
def test_a_line_has_peaks_of_one_kind(scheduled_bytes: int | None) -> None:
    report = _report().with_outcome(scheduled_peak_bytes=scheduled_bytes)
    (line,) = _lines(report, "under Inductor alone")
    assert "100.0 MiB (simulated), 300.0 MiB under Inductor alone" in line
    assert [bytes_text(77 * MIB) in line for line in _lines(report, "schedule")] == (
        [] if scheduled_bytes is None else [True]
    )
    for text in (*str(report).splitlines(), *summary(report, {}).split(" | ")):
        assert not ("77.0 MiB" in text and ("100.0 MiB" in text or "300.0 MiB" in text))
    assert "peak 300.0 MiB -> 100.0 MiB" in summary(report, {})


def test_without_a_simulated_peak_the_schedule_s_stands_alone() -> None:
    report = Report(Outcome(scheduled_peak_bytes=77 * MIB))
    assert "peak 77.0 MiB" in summary(report, {})
    assert len(_lines(report, "peak memory")) == 1


def test_what_asks_for_nothing_is_one_line() -> None:
    asked = Rejection("detect", "amax", MIXES, "model.score", 3 * MIB)
    report = _report(asked, *_mlps(6, ELSEWHERE))
    (line,) = _lines(report, "nothing to change")
    assert "6 parts of up to 5.0 MiB" in line and "model.layers.{0-1}.mlp.a" in line
    assert str(report).count("why: ") == 1 and MIXES in str(report)
    assert ELSEWHERE not in str(report)
    assert len(report.rejections) == 7 == len(report.to_dict()["rejections"])


def test_many_of_them_still_fit_the_line() -> None:
    parts = [
        dataclasses.replace(rejection, source=f"part_{'x' * i}.mlp")
        for i, rejection in enumerate(_mlps(30, ELSEWHERE))
    ]
    (line,) = _lines(_report(*parts), "nothing to change")
    assert len(line) <= 110 and line.endswith(".mlp, ...)")


def test_too_few_tokens_matter_where_nothing_else_runs_in_chunks() -> None:
    assert "nothing to change" in str(_report(*_mlps(3, TOO_FEW)))
    assert TOO_FEW[:60] in str(_report(*_mlps(3, TOO_FEW), regions=()))


def test_too_few_tokens_matter_for_a_wide_part() -> None:
    """Other parts run in chunks; this one has more than 5 % of the peak."""
    text = str(_report(*_mlps(2, TOO_FEW, size=6 * MIB)))
    assert TOO_FEW[:60] in text and "more rows at once" in text
    assert "nothing to change" not in text


def test_small_parts_do_not_matter() -> None:
    assert "nothing to change" in str(_report(*_mlps(1, MIXES, size=MIB // 2)))
    assert "why: " in str(_report(*_mlps(1, MIXES, size=2 * MIB)))
    whole_graph = Rejection("error", "graph", "ValueError: no", bytes=0)
    assert "why: " in str(_report(whole_graph))


def test_what_makes_the_peak_is_named_where_no_loop_was_looked_for() -> None:
    """In layers of one width no product widens tokens. A head that is refused has its reason."""
    head = torch.nn.Linear(64, 4096, device="meta")
    x = torch.zeros(1024, 64, device="meta")

    def of_a_head(x: torch.Tensor) -> torch.Tensor:
        return head(x).prod(0).sum()  # refused

    least = {"memory_budget": 0.0}
    square = torch.zeros(64, 64, device="meta", requires_grad=True)

    def equal_widths(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x @ square).relu()
        return x.square().mean()

    text = str(mstpass.explain(equal_widths, x, options=least))
    assert "has no loops: " in text and "no product there widens tokens" in text
    assert "has no loops: " not in str(mstpass.explain(of_a_head, x, options=least))
