"""Where a compiled graph's report goes on its own, besides ``mstpass.reports()``.

- ``TORCH_LOGS="mstpass"``: a line for each graph; ``"+mstpass"``: its report and stage timings;
- ``TORCH_TRACE=DIR``: artifacts ``mstpass_report`` and ``mstpass_report_json``, for tlparse;
- ``TORCH_COMPILE_DEBUG=1``: files in a folder beside those of Inductor.

Each costs next to nothing where it is not asked for, and none can stop a compilation.

Private APIs, checked with torch 2.11 and 2.13: ``torch._logging._internal.trace_structured``,
``torch._inductor.config.trace``, ``torch._dynamo.utils.get_debug_dir``,
``torch._functorch._aot_autograd.logging_utils.get_aot_graph_name``.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._logging._internal import trace_structured

from mstpass.errors import MissingPackageError
from mstpass.report.drawing import loop_label
from mstpass.report.report import Report
from mstpass.report.units import bytes_text

log = logging.getLogger(__name__)


def announce(report: Report, seconds: Mapping[str, float]) -> None:
    """Tell of a new report wherever the user asked for it.

    Args:
        seconds: of each stage of planning; empty for a report from beside the compile cache.
    """
    for tell in (_log, _trace, _write_debug_files):
        try:
            tell(report, seconds)
        except Exception as error:
            log.warning("mstpass could not tell of a report: %s: %s", type(error).__name__, error)


def summary(report: Report, seconds: Mapping[str, float]) -> str:
    """A line: loops, peak without and with the plan, what crosses, planning time."""
    loops = Counter(map(loop_label, report.regions))
    parts = [f"{label}" + (f" (x {n})" if n > 1 else "") for label, n in loops.items()]
    facts = ["; ".join(parts) or "nothing chunked"]
    if report.peak_bytes is not None:
        before = report.baseline_peak_bytes
        peaks = ([bytes_text(before)] if before is not None else []) + [
            bytes_text(report.peak_bytes)
        ]
        facts.append(f"peak {' -> '.join(peaks)}")
    facts.append(f"saved for backward {bytes_text(report.saved_bytes)}")
    facts.append(f"{len(report.rejections)} not taken")
    facts.append("from the cache" if report.cached else f"planned in {sum(seconds.values()):.2f} s")
    return "mst: " + " | ".join(facts)


def _text(report: Report, seconds: Mapping[str, float]) -> str:
    return f"{summary(report, seconds)}\n\n{report}\n"


def _log(report: Report, seconds: Mapping[str, float]) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", summary(report, seconds))
    if log.isEnabledFor(logging.DEBUG):
        stages = ", ".join(f"{stage} {value:.3f} s" for stage, value in seconds.items())
        text = f"{report}\n  stages: {stages}" if stages else str(report)
        log.debug("%s", text)


def _trace(report: Report, seconds: Mapping[str, float]) -> None:
    """Payloads are made only where a trace is written."""

    def artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
        about = {"name": name, "encoding": encoding}
        trace_structured("artifact", metadata_fn=lambda: about, payload_fn=payload)

    artifact("mstpass_report", "string", lambda: _text(report, seconds))
    artifact("mstpass_report_json", "json", report.json_text)


def _write_debug_files(report: Report, seconds: Mapping[str, float]) -> None:
    import torch._inductor.config as inductor_config

    if not inductor_config.trace.enabled:
        return
    folder = _debug_folder(inductor_config.trace.debug_dir)
    (folder / "mstpass_report.txt").write_text(_text(report, seconds), encoding="utf-8")
    report.to_json(folder / "mstpass_report.json")
    if report.details is not None:
        report.to_html(folder / "mstpass_report.html")
        report.to_perfetto(folder / "mstpass_perfetto.json")
        try:
            (folder / "mstpass_report.dot").write_text(report.to_dot(), encoding="utf-8")
        except MissingPackageError as error:
            log.info("%s", error)
    log.info("debug files: %s", folder)


def _debug_folder(root: str | None) -> Path:
    """A new folder beside Inductor's, whose names begin with the graph's."""
    from torch._dynamo.utils import get_debug_dir

    parent = Path(root or get_debug_dir()) / "torchinductor"
    for number in itertools.count():
        folder = parent / f"{get_aot_graph_name()}_mstpass.{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError
