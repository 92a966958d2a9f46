"""The results of `mstpass bench gpu`: tables, the page, and the README's section."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mstpass.bench.gpu import command, heads, results
from mstpass.bench.gpu.state import MEASURED, OUT_OF_MEMORY, State

ROOT = Path(__file__).parent.parent
H200 = {"card": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}


def measured(row, median_s, peak, **rest):
    flops = 6.0 * 8192 * heads.WIDTH * heads.VOCABULARY / median_s
    figures = {"median_s": median_s, "peak_bytes": peak, "flops_per_s": flops}
    outcome = {"status": MEASURED, "text": "", "ratio": [0.9, 0.8, 1.0], **figures, **rest}
    return {"part": "heads", "case": "N=8192", "row": row, **outcome}


def results_of(**header):
    run = dict.fromkeys(("cuda", "triton", "mstpass", "transformers", "python", "clocks"), "1")
    return {
        "header": {**H200, "torch": "2.11.0", "dry": False, "quick": False, **header},
        "runs": [{**run, "date": "2026-12-01T10:00", "driver": "580.1"}],
        "rows": [
            measured("Inductor", 0.040, 20 * 2**30),
            measured("mst", 0.0355, 2 * 2**30, plan="lm_head fused in 8"),
            {**measured("eager", 1, 1), "status": OUT_OF_MEMORY},
            {**measured("slow", 1, 1), "status": "took too long", "text": "more than 9 s"},
        ],
    }


def test_tables_show_rates_shares_and_what_happened():
    found = results.all_tables(results_of())
    (head,) = found["heads"]
    mst = dict(zip(head.columns, head.rows[1], strict=True))
    assert mst["time ms"] == "35.5" and mst["time / Inductor"] == "0.90x (0.80-1.00)"
    assert mst["TFLOP/s"] == "727" and mst["of the limit"] == "74 %"  # of 989.4
    assert mst["peak GiB"] == "2.00" and mst["peak / Inductor"] == "0.10x"
    assert head.rows[2][1] == "out of memory"
    assert head.rows[3][1] == "took too long: more than 9 s"


def test_the_limit_of_a_card():
    assert results.limit_flops_per_s(H200) == pytest.approx(989.4e12)
    assert results.limit_flops_per_s({**H200, "multiprocessors": 66}) == pytest.approx(494.7e12)
    assert results.limit_flops_per_s({"card": "none"}) is None
    assert results.limit_flops_per_s({**H200, "capability": [42, 0]}) is None
    assert not math.isnan(results.limit_flops_per_s(H200))


def test_the_readme_shows_what_was_measured(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:gpu -->\nold\n<!-- /bench:gpu -->\nafter\n")
    results.write_readme(readme, results_of())
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| **mst** | 2.00 | 35.5 | 727 | 74 % | 0.90x (0.80-1.00) |" in text
    assert "2026-12-01, NVIDIA H200, driver 580.1, torch 2.11.0" in text
    for changes in ({"dry": True}, {"quick": True}):
        assert "Nothing has been measured" in results.readme_section(results_of(**changes))
    page = results.section(results_of())
    assert "- N=8192, mst: lm_head fused in 8." in page and "at most 989 TFLOP/s" in page
    assert "dry run" not in page and "dry run" in results.section(results_of(dry=True))


def test_readme_and_page_are_those_of_the_published_results():
    data = results.published_data()
    for path, section in (
        (ROOT / "README.md", results.readme_section(data)),
        (ROOT / "docs" / "results" / "gpu.md", results.section(data)),
    ):
        text = path.read_text(encoding="utf-8")
        assert results.with_section(text, results.MARK, section) == text, (
            f"{path} is not what `mstpass bench gpu --tables` writes"
        )


def test_a_published_run_writes_the_readme(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("# x\n")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    State.open(tmp_path / "results", {**H200, "torch": "2", "quick": False, "dry": False})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "results" / "gpu.jsonl").rename(tmp_path / "elsewhere" / "gpu.jsonl")
    assert command.main(["--tables", "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "README.md").read_text() == "# x\n"
