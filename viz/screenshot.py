"""Draws docs/img/report.png: the HTML report of a Llama-like step, as Chromium shows it.

    python viz/screenshot.py [OUT.png]

Needs chromium (or its path in CHROME_PATH), chromedriver and selenium.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from selenium import webdriver

from mstpass.bench.models import LlamaSize, llama
from mstpass.explainer import explain_parts

OUT = Path(__file__).parents[1] / "docs" / "img" / "report.png"
SIZE = {"width": 1440, "height": 1240, "deviceScaleFactor": 1, "mobile": False}


def main(out: Path = OUT) -> None:
    chrome = os.environ.get("CHROME_PATH") or shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if chrome is None or driver is None:
        sys.exit("viz/screenshot.py needs chromium (or its path in CHROME_PATH) and chromedriver")
    model, ids_BS, target_BS = llama(LlamaSize(), torch.device("meta"))
    (report,) = explain_parts(model, (ids_BS, target_BS), pareto=True, fullgraph=True)
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    service = webdriver.ChromeService(driver)
    with (
        tempfile.TemporaryDirectory() as folder,
        webdriver.Chrome(options=options, service=service) as browser,
    ):
        page = Path(folder) / "report.html"
        report.to_html(page, title="A Llama-like step: 4 layers, 2048 tokens, vocabulary 32000")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
        browser.get(page.as_uri())
        browser.save_screenshot(str(out))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
