"""The reports of this process, and of graphs that come from a compile cache.

A cache hit does not run the partitioner and so makes no report. Therefore each new report is also
written beside Inductor's cache, under a key made from the graph that Dynamo captured, and a hit
reads it back. Clearing the cache clears both.

Send each new report to the places where PyTorch users look for information.

- ``TORCH_LOGS="mstpass"`` logs one line for each graph, ``"+mstpass"`` its report as well;
- ``TORCH_TRACE=DIR`` gets the artifacts ``mstpass_report`` and ``mstpass_report_json``, which
  tlparse shows;
- ``TORCH_COMPILE_DEBUG=1`` gets a folder with the report's files beside Inductor's own folders.

A report that nobody asked for costs next to nothing, and a failure here never stops a compilation.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mstpass.byte_sizes import bytes_text
from mstpass.errors import MissingPackageError
from mstpass.plain_data import replace_text
from mstpass.report.boxes import loop_label
from mstpass.report.report import Report
from mstpass.torch_internals.caches import (
    cache_folder,
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


# ---- the store -----------------------------------------------------------------------------------
_REPORTS: list[Report] = []


def reports() -> list[Report]:
    """The reports of the graphs compiled in this process, cache hits included, oldest first."""
    return list(_REPORTS)


def keep(report: Report, *seconds: Mapping[str, float]) -> None:
    """Keep a report in memory and publish it.

    Args:
        seconds: the time of each stage of planning, and that of each pass.
    """
    _REPORTS.append(report)
    publish(report, *(seconds or ({},)))


def add(report: Report, key: str, *seconds: Mapping[str, float]) -> None:
    """Keep and publish a new report, and write it beside the compile cache.

    Args:
        key: from `graph_key`.
        seconds: as for `keep`.
    """
    keep(report, *seconds)
    remember(report, key)


def remember(report: Report, key: str) -> None:
    """Write a report beside the compile cache, for `recall`; `reports` does not show it.

    Another process reads the whole file or none. A failure is logged and stops no compilation.
    """
    path = _file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, report.json_text())
    except Exception as error:
        log.warning("mstpass could not write a report beside the compile cache: %s", error)


def write(report: Report, path: str) -> None:
    """Write a report where the user asked for it, under a new name if the file exists.

    Raises:
        OSError: it cannot be written; then no part of it is left.
    """
    text = report.json_text()
    target = _new_file(Path(path))
    try:
        target.write_text(text, encoding="utf-8")
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _new_file(path: Path) -> Path:
    """An empty file at the path, with a number in its name if there is one already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path
    for number in itertools.count(2):
        try:
            target.touch(exist_ok=False)
            break
        except FileExistsError:
            target = path.with_stem(f"{path.stem}-{number}")
    return target


def add_nested(reports: Sequence[Report], key: str) -> None:
    """`add` the reports of the regions that a graph calls, in front of the graph's own."""
    for number, report in enumerate(reports):
        add(report, _nested_key(key, number))


def recall_nested(key: str) -> list[Report]:
    """`recall` what `add_nested` wrote for the graph of this key."""
    recalled = (recall(_nested_key(key, number)) for number in itertools.count())
    return list(itertools.takewhile(lambda report: report is not None, recalled))  # type: ignore


def _nested_key(key: str, number: int) -> str:
    return f"{key}-nested-{number}"


def recall(key: str) -> Report | None:
    """The report that an earlier process wrote beside the compile cache; None if there is none.

    Raises:
        ReportFileError: the file is broken.
    """
    try:
        return Report.from_json(_file(key), cached=True)
    except OSError as error:
        log.debug("no report beside the compile cache for this graph: %s", error)
        return None


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any], salt: str) -> str:
    """The same text for the same Dynamo graph in every process.

    It is a hash of the graph's code, the metadata of its inputs, and the grad and autocast modes.

    Args:
        salt: further text that the report depends on, such as the options.
    """
    digest = hashlib.sha256(salt.encode())
    digest.update(gm.code.encode())
    for value in inputs:
        if isinstance(value, torch.Tensor):
            layout = (value.dtype, tuple(map(str, value.shape)), value.device, value.requires_grad)
            digest.update(repr(layout).encode())
        else:
            digest.update(repr(value).encode())
    state = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
    digest.update(repr(state).encode())
    return digest.hexdigest()


def _file(key: str) -> Path:
    return cache_folder() / "mstpass" / f"{key}.json"
