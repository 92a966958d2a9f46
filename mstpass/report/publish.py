"""Send each new report to the places where PyTorch users look for information.

- ``TORCH_LOGS="mstpass"`` logs one line for each graph, ``"+mstpass"`` its report as well;
- ``TORCH_TRACE=DIR`` gets the artifacts ``mstpass_report`` and ``mstpass_report_json``, which
  tlparse shows;
- ``TORCH_COMPILE_DEBUG=1`` gets a folder with the report's files beside Inductor's own folders.

A report that nobody asked for costs next to nothing, and a failure here never stops a compilation.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from mstpass.byte_sizes import bytes_text
from mstpass.errors import MissingPackageError
from mstpass.report.drawing.boxes import loop_label
from mstpass.report.report import Report
from mstpass.torch_internals.caches import (
    debug_folder,
    get_aot_graph_name,
    trace_structured_artifact,
)

log = logging.getLogger(__name__)


def publish(
    report: Report,
    stage_seconds: Mapping[str, float],
    pass_seconds: Mapping[str, float] | None = None,
) -> None:
    """Write a new report wherever the user asked for it.

    Args:
        stage_seconds: the time of each stage of planning; empty for a report that was read from
            beside the compile cache.
        pass_seconds: the time of each pass, which its stage's counts as well.
    """
    write_log = functools.partial(_write_log, pass_seconds=pass_seconds or {})
    for write in (write_log, _write_trace, _write_debug_files):
        try:
            write(report, stage_seconds)
        except Exception as error:
            log.warning("mstpass could not publish a report: %s: %s", type(error).__name__, error)


def summary(report: Report, stage_seconds: Mapping[str, float]) -> str:
    """One line: the loops, the peak without and with chunks, the saved bytes, the planning time."""
    loops = Counter(map(loop_label, report.regions))
    labels = [label + (f" (x {count})" if count > 1 else "") for label, count in loops.items()]
    no_plan = report.outcome.no_plan and f"no plan: {report.outcome.no_plan}"
    facts = ["; ".join(labels) or no_plan or "nothing runs in chunks"]
    peaks = (report.baseline_peak_bytes, report.outcome.peak_bytes)  # both simulated, or no pair
    if report.outcome.peak_bytes is None:
        peaks = (None, report.peak_bytes)
    if peaks[1] is not None:
        facts.append(f"peak {' -> '.join(bytes_text(p) for p in peaks if p is not None)}")
    facts.append(f"saved for backward {report.saved_text}")
    facts.append(f"{len(report.rejections)} not in chunks")
    seconds = sum(stage_seconds.values())
    facts.append("from the compile cache" if report.cached else f"planned in {seconds:.2f} s")
    return "mst: " + " | ".join(facts)


def _full_text(report: Report, stage_seconds: Mapping[str, float]) -> str:
    return f"{summary(report, stage_seconds)}\n\n{report}\n"


def _write_log(
    report: Report, stage_seconds: Mapping[str, float], pass_seconds: Mapping[str, float]
) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", summary(report, stage_seconds))
    if log.isEnabledFor(logging.DEBUG):
        times = (("planning time", stage_seconds), ("of it in passes", pass_seconds))
        lines = [f"\n  {what}: {_seconds_text(each)}" for what, each in times if each]
        log.debug("%s", "".join((str(report), *lines)))


def _seconds_text(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())


def _write_trace(report: Report, stage_seconds: Mapping[str, float]) -> None:
    """The payloads are functions: torch calls them only if a trace is written."""
    text = functools.partial(_full_text, report, stage_seconds)
    trace_structured_artifact("mstpass_report", "string", text)
    trace_structured_artifact("mstpass_report_json", "json", report.json_text)


def _write_debug_files(report: Report, stage_seconds: Mapping[str, float]) -> None:
    parent = debug_folder()
    if parent is None:
        return
    folder = _folder_of_graph(parent)
    text = _full_text(report, stage_seconds)
    (folder / "mstpass_report.txt").write_text(text, encoding="utf-8")
    report.to_json(folder / "mstpass_report.json")
    if report.details is not None:
        report.to_html(folder / "mstpass_report.html")
        report.to_perfetto(folder / "mstpass_perfetto.json")
        try:
            (folder / "mstpass_report.dot").write_text(report.to_dot(), encoding="utf-8")
        except MissingPackageError as error:
            log.info("no mstpass_report.dot: %s", error)
    log.info("debug files: %s", folder)


def _folder_of_graph(parent: Path) -> Path:
    """A new folder beside Inductor's, with the graph's name in front as theirs have."""
    for number in itertools.count():
        folder = parent / f"{get_aot_graph_name()}_mstpass.{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError
