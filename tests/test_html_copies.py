"""Copies to the host and back in the HTML report."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.html_page import (
    Open,
    ends,
    facts,
    key,
    text,
    texts,
)
from tests.synthetic_reports import llama_report, report_with_copies


def test_copies_stand_beside_the_computation(open_page: Open) -> None:
    report = report_with_copies(3)
    page = open_page(report)
    assert "The 6 copies take 6.000 ms" in text(page, "#copies > p")
    assert "during 83.3 % of that time" in text(page, "#copies > p").replace("\u00a0", " ")
    forward, backward = page.find_elements("css selector", "#copies .plot")
    for plot, start, end in ((forward, 0.4, 0), (backward, 0, 0.6)):
        assert len(plot.find_elements("css selector", ".copy")) == 3
        waits, others = (ends(page, plot, kind) for kind in ("rect.waiting", ".copy rect"))
        (wait,) = waits
        assert any(abs(wait[1] - other[1]) < 2 for other in others), "it ends as its copy does"
        (device,) = ends(page, plot, "rect.computing")
        share = (wait[1] - wait[0]) / (device[1] - device[0])
        assert share == pytest.approx((start + end) / (30 + start + end), rel=0.05)


def test_a_copy_leads_to_its_value(open_page: Open) -> None:
    report = report_with_copies(3)
    page = open_page(report)
    second = sorted(report.offloaded, key=lambda name: int(name.partition("_")[2]))[1]
    copies = page.find_elements("css selector", "#copies .plot .copy")
    assert [copy.get_attribute("tabindex") for copy in copies] == ["0", "-1", "-1"] * 2
    copies[0].send_keys(key("ARROW_RIGHT"))
    reading = text(page, "#copies .reading")
    assert reading.startswith(f"{second} (layers.1, model.py:12): 2.0 MiB to the host")
    assert "the device does not wait" in reading
    marked = page.find_elements("css selector", "#copies .copy.marked")
    assert [copy.get_attribute("aria-label").partition(" ")[0] for copy in marked] == [second] * 2
    page.switch_to.active_element.send_keys(key("ENTER"))
    assert ("name", second) in facts(page)
    assert "copies it back" in text(page, ".inspector")
    assert ", back from the host," in dict(facts(page))["in memory"]


def test_values_on_the_host_count_apart(open_page: Open) -> None:
    report = report_with_copies(2)
    page = open_page(report)
    (card,) = (c for c in page.find_elements("css selector", ".card") if "Saved" in c.text)
    assert "48.0 MiB" in card.text and "on the host 2 more, 4.0 MiB" in card.text
    waits = texts(page, "#saved td:nth-child(3)")
    assert Counter(waits) == {"on the device": 12, "on the host": 2}
    assert len(page.find_elements("css selector", "#copies tbody tr")) == 4


def test_the_timeline_names_what_is_back_from_the_host(open_page: Open) -> None:
    report = report_with_copies(1)
    page = open_page(report)
    assert report.details is not None and report.details.after is not None
    after = report.details.after
    (back,) = (life for life in after.lives if life.node.startswith("reload:"))
    plot = page.find_element("css selector", ".memory .plot")
    steps = back.start - int(plot.get_attribute("aria-valuenow"))
    plot.send_keys(key("ARROW_RIGHT" if steps > 0 else "ARROW_LEFT") * abs(steps))
    (name,) = report.offloaded
    (row,) = (r for r in page.find_elements("css selector", ".live tr") if "from the" in r.text)
    assert f"copy of {name} from the host" in row.text and "layers.0" in row.text


def test_without_copies_there_is_no_word_of_them(open_page: Open) -> None:
    page = open_page(llama_report(1))
    assert page.find_elements("css selector", "#copies") == []
    assert "host" not in page.execute_script("return document.body.innerText")
