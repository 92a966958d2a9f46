"""The HTML report, in a headless Chromium where there is one."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mstpass
from mstpass.plans import Outcome
from mstpass.report.report import Report
from tests.html_page import (
    Open,
    facts,
    key,
    press_row,
    resize,
    text,
    texts,
    titles,
    webdriver,
)
from tests.synthetic_reports import llama_report, report_with_copies

ROOT = Path(__file__).parents[1]
HOSTILE = "</script><img src=x onerror=hacked=1><!--&lt;'\"`${hacked=1}\u2028\ud800"


# ---- the file ----------------------------------------------------------------------------------
def test_hostile_strings_stay_data(tmp_path: Path) -> None:
    report = llama_report(1, lambda text: text + HOSTILE)
    report.to_html(tmp_path / "report.html", title=HOSTILE.replace("\ud800", ""))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(re.findall("<script", text)) == len(re.findall("</script", text)) == 2
    assert "<img" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1])["report"] == json.loads(json.dumps(report.to_dict(), default=sorted))


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    llama_report(1).to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=\"(?!#)", text)
    assert not re.search(r"url\((?!#)", text)


@pytest.mark.full
def test_a_wheel_brings_the_viewer(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mstpass", tmp_path / "mstpass")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "out", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    [wheel] = (tmp_path / "out").glob("*.whl")
    shipped = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "viewer" in name}
    assert shipped == {path.name for path in (ROOT / "mstpass/report/viewer").iterdir()}


# ---- the page ----------------------------------------------------------------------------------
def test_says_what_was_won(open_page: Open) -> None:
    report = llama_report(2)
    page = open_page(report)
    assert report.peak_bytes is not None and report.baseline_peak_bytes is not None
    for size in (report.peak_bytes, report.baseline_peak_bytes):
        assert f"{size / 2**20:.1f} MiB" in text(page, "h1")
    assert f"{report.saved_bytes / 2**20:.1f} MiB" in text(page, ".cards")
    links = page.find_elements("css selector", "nav a")
    assert all(page.find_elements("css selector", link.get_dom_attribute("href")) for link in links)


def test_folds_by_module_and_layer(open_page: Open) -> None:
    page = open_page(llama_report(3))
    folded = ["inputs of the step", "embed", "layers", "layers.0", "layers.1", "layers.2"]
    assert titles(page) == folded
    press_row(page, "layers.1")
    inside = ["attention_norm", "attention", "mlp_norm", "mlp"]
    assert titles(page)[5:9] == inside
    press_row(page, "attention_norm")
    ops = texts(page, ".cell.node.forward .op")
    assert ops[:6] == ["pow", "mean", "add", "rsqrt", "mul", "mul"]
    press_row(page, "layers.1")
    assert titles(page) == folded


def test_what_crosses_is_as_wide_as_its_bytes(open_page: Open) -> None:
    report = llama_report(3)
    page = open_page(report)
    script = "return [...document.querySelectorAll('.band.saved title')].map((e) => e.textContent)"
    titles = page.execute_script(script)
    sizes = [float(size) for title in titles for size in re.findall(r"([\d.]+) MiB", title)]
    assert sum(sizes) * 2**20 == report.saved_bytes
    page.find_element("css selector", ".legend input").click()
    assert not page.find_elements("css selector", ".band.saved")
    assert page.find_elements("css selector", ".band.reconstructed")


def test_the_graph_by_keyboard(open_page: Open) -> None:
    page = open_page(llama_report(2))
    rows = page.find_element("css selector", ".rows")
    for pressed in ("HOME", *["ARROW_DOWN"] * 4, "ARROW_RIGHT", "ARROW_DOWN", "ENTER"):
        rows.send_keys(key(pressed))
    assert text(page, ".inspector h3") == "layers.1.attention_norm"
    active = page.find_element("id", rows.get_attribute("aria-activedescendant"))
    assert active.get_attribute("aria-level") == "3"
    rows.send_keys(key("ARROW_LEFT"))
    rows.send_keys(key("ARROW_LEFT"))
    assert titles(page)[-2:] == ["layers.0", "layers.1"]


def test_search_opens_what_it_finds(open_page: Open) -> None:
    page = open_page(llama_report(12))
    search = page.find_element("css selector", "[type=search]")
    search.send_keys("LAYERS.11.attention")
    assert "attention_norm" in text(page, "#found")
    search.clear()
    search.send_keys("sdpa_")
    found = page.find_elements("css selector", "#found [role=option] .title")
    wanted = found[1].text
    search.send_keys(key("ARROW_DOWN"))
    search.send_keys(key("ENTER"))
    assert ("name", wanted) in facts(page)
    assert texts(page, ".cell.node.selected .name") == [wanted]


def test_the_timeline_lists_what_is_alive(open_page: Open) -> None:
    report = llama_report(2)
    page = open_page(report)
    assert report.details is not None and report.details.after is not None
    after = report.details.after
    plot = page.find_element("css selector", ".memory .plot")
    peak = after.bytes.index(after.peak_bytes)
    assert plot.get_attribute("aria-valuenow") == str(peak)
    assert "the peak" in plot.get_attribute("aria-valuetext")
    plot.send_keys(key("ARROW_RIGHT"))
    alive = after.alive_at(peak + 1)
    names = texts(page, ".live td.wide button")
    assert names == [life.node for life in alive][: len(names)]
    assert len(names) == min(len(alive), 30)
    plot.send_keys(key("HOME"))
    assert texts(page, ".live td:nth-child(4)") == ["embed"]
    page.find_element("css selector", ".memory .key.before").click()
    assert plot.get_attribute("aria-valuenow") == "0"
    chains = webdriver().ActionChains(page)
    chains.move_to_element_with_offset(plot, 300, 0).perform()
    assert int(plot.get_attribute("aria-valuenow")) > after.first_backward


def test_tables_sort_and_copy(open_page: Open) -> None:
    report = llama_report(2)
    page = open_page(report)
    page.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    sizes = [value.bytes for value in report.saved]
    head = page.find_elements("css selector", "#saved th")[1]
    head.find_element("tag name", "button").click()
    head.find_element("tag name", "button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert texts(page, "#saved td.number") == [f"{size / 2**20:.1f} MiB" for size in sorted(sizes)]
    page.find_element("css selector", "[aria-label='Copy the table: Saved for backward']").click()
    text = page.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    lines = [line.split("\t") for line in text.split("\n")]
    assert lines[0][:2] == ["value", "bytes"]
    assert len(lines) == 1 + len(sizes)


def test_rejections_say_why(open_page: Open) -> None:
    page = open_page(llama_report(1))
    assert "it is too small" in text(page, "#rejections")


def test_what_asks_for_nothing_is_one_line_that_opens(open_page: Open) -> None:
    report = llama_report(1)
    (asked,) = report.rejections
    unasked = dataclasses.replace(asked, reason="its peak lies elsewhere", fix="change nothing")
    page = open_page(report.with_outcome(rejections=(asked, unasked, unasked)))
    assert len(page.find_elements("css selector", "#rejections > .holder tbody tr")) == 1
    summary = page.find_element("css selector", "#rejections summary")
    assert summary.text.endswith("nothing to change: 2 parts of up to 2.0 MiB")
    rows = page.find_elements("css selector", "#rejections details tbody tr")
    assert len(rows) == 2 and not rows[0].is_displayed()
    summary.click()
    assert rows[0].is_displayed() and "lies elsewhere" in rows[0].text


def test_hostile_names_are_shown_as_they_are(open_page: Open) -> None:
    page = open_page(report_with_copies(1, lambda text: text + HOSTILE))
    assert page.execute_script("return typeof hacked") == "undefined"
    assert page.find_elements("css selector", "img") == []
    same = "return document.querySelector('.note').textContent.startsWith(arguments[0])"
    assert page.execute_script(same, "a note" + HOSTILE[:40])
    page.find_element("css selector", ".buttons button:nth-child(3)").click()
    page.find_element("css selector", "[type=search]").send_keys("</script>")
    assert page.find_elements("css selector", "#found [role=option]")
    assert page.execute_script("return typeof hacked") == "undefined"


class _Hostile(nn.Module):
    """A model whose modules are named by somebody who means no good."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "<script>hacked=1</script><img src=x onerror=hacked=1>"
        self.add_module(self.name, nn.Linear(32, 4096, bias=False))

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(getattr(self, self.name)(hidden), labels)


def test_a_module_that_is_named_script_is_shown(open_page: Open) -> None:
    model = _Hostile()
    report = mstpass.explain(model, torch.randn(512, 32), torch.arange(512))
    assert report.regions and model.name in str(report)
    page = open_page(report)
    assert page.execute_script("return typeof hacked") == "undefined"
    assert page.find_elements("css selector", "img") == []
    assert model.name in page.execute_script("return document.body.innerText")


def test_a_report_of_the_plan_alone(open_page: Open) -> None:
    report = Report(report_with_copies(1).outcome)
    page = open_page(report)
    assert len(page.find_elements("css selector", "#copies .copy[role=img]")) == 2
    assert "the plan alone" in text(page, "main")
    assert page.find_elements("css selector", ".graph, .memory, .pareto") == []
    assert len(page.find_elements("css selector", "#saved tbody tr")) == len(report.saved)


def test_nothing_to_compare_with(open_page: Open) -> None:
    report = llama_report(1)
    assert report.details is not None
    outcome = dataclasses.replace(report.outcome, baseline_peak_bytes=None, extra_time=None)
    details = dataclasses.replace(report.details, before=None, pareto=())
    page = open_page(Report(outcome, details=details))
    assert len(page.find_elements("css selector", ".memory .series")) == 1
    assert "instead of" not in text(page, "h1")
    assert "Plans at other budgets are not in this report" in text(page, ".pareto")


def test_a_report_of_nothing(open_page: Open) -> None:
    page = open_page(Report(Outcome()))
    assert text(page, "h1") == "The peak of this step is not known."


def test_no_module_is_known(open_page: Open) -> None:
    page = open_page(llama_report(1, lambda text: "" if "layers" in text else text))
    assert titles(page) == ["inputs of the step", "embed", "outside any module"]


@pytest.mark.parametrize("width", [390, 1440])
def test_fits_the_screen(open_page: Open, browser: Any, width: int) -> None:
    resize(browser, width, 844)
    page = open_page(report_with_copies(4))
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    small = page.execute_script(
        "return [...document.querySelectorAll('button, input, .row')].filter((e) => {"
        "const box = e.getBoundingClientRect(); return box.width && box.height < 15}).length"
    )
    assert small == 0
    cut = page.execute_script(
        "return [...document.querySelectorAll('h1, h2, h3, .figure, .card, .row .title')]"
        ".filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"
    )
    assert cut == []


def test_ten_thousand_nodes(open_page: Open, tmp_path: Path) -> None:
    report = llama_report(64)
    assert report.details is not None and len(report.details.nodes) > 9_400
    page = open_page(report)
    assert (tmp_path / "report.html").stat().st_size < 10e6
    drawn = page.execute_script(
        "const [start] = performance.getEntriesByName('mstpass:start');"
        "return start.startTime + start.duration"
    )
    assert drawn < 4_000  # about 200 ms where nothing else runs
    buttons = page.find_elements("css selector", ".graph .buttons button")
    for _ in range(3):
        for button in (buttons[2], buttons[0], buttons[1]):
            button.click()
    buttons[2].click()
    assert int(page.find_element("css selector", ".rows").get_attribute("aria-rowcount")) > 5_000
    assert len(page.find_elements("css selector", ".row")) < 60
    folds = page.execute_script(
        "return performance.getEntriesByName('mstpass:fold').map((entry) => entry.duration)"
    )
    assert statistics.median(folds) < 100
    page.find_element("css selector", "[type=search]").send_keys("mm_4")
    searches = page.execute_script(
        "return performance.getEntriesByName('mstpass:search').map((entry) => entry.duration)"
    )
    assert statistics.median(searches) < 100
