"""A report's HTML page in a headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mstpass.report.report import Report

Open = Callable[..., Any]
FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    names = ("chromium", "chromium-browser", "google-chrome")
    chrome = os.environ.get("CHROME_PATH") or next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if chrome is None or driver is None:
        pytest.skip("needs chromium and chromedriver (or CHROME_PATH) to open the page")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chrome')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as started:
        yield started


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report's page, written with more arguments; after the test the console is empty."""
    resize(browser, 1440, 900)

    def open_(report: Report, **written: Any) -> Any:
        path = tmp_path / "report.html"
        report.to_html(path, **written)
        browser.get(path.as_uri())
        drawn = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        browser.execute_async_script(drawn)  # once more, by the observers of sizes
        return browser

    yield open_
    assert browser.get_log("browser") == []


def resize(browser: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def text(page: Any, selector: str) -> str:
    return str(page.find_element("css selector", selector).text)


def texts(page: Any, selector: str) -> list[str]:
    """What all elements say, read at once: the page may draw them anew between two questions."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())"
    return [str(text) for text in page.execute_script(script, selector)]


def ends(page: Any, plot: Any, selector: str) -> list[tuple[float, float]]:
    """Where the boxes of a plot begin and end, in pixels."""
    script = (
        "return [...arguments[0].querySelectorAll(arguments[1])].map((e) => {"
        "const box = e.getBoundingClientRect(); return [box.left, box.right]})"
    )
    return [(left, right) for left, right in page.execute_script(script, plot, selector)]


def titles(page: Any) -> list[str]:
    return texts(page, ".row.module .title")


def press_row(page: Any, title: str) -> None:
    """Clicks on a module; again where the page drew its rows anew between the two."""
    from selenium.common.exceptions import StaleElementReferenceException

    def press(page: Any) -> bool:
        found = page.find_elements("css selector", ".row.module .title")
        next(element for element in found if element.text == title).click()
        return True

    wait = webdriver().support.wait.WebDriverWait
    wait(page, 20, 0.05, [StaleElementReferenceException]).until(press)


def facts(page: Any) -> list[tuple[str, str]]:
    names = page.find_elements("css selector", ".inspector dt")
    values = page.find_elements("css selector", ".inspector dd")
    return [(name.text, value.text) for name, value in zip(names, values, strict=True)]


def webdriver() -> Any:
    import selenium.webdriver
    import selenium.webdriver.support.wait

    return selenium.webdriver


def key(name: str) -> str:
    from selenium.webdriver.common.keys import Keys

    return str(
        getattr(
            Keys,
            {"Left": "ARROW_LEFT", "Right": "ARROW_RIGHT", "Down": "ARROW_DOWN"}.get(
                name, name.upper()
            ),
        )
    )
