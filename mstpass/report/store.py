"""The reports of this process, and of graphs that come from a compile cache.

A cache hit does not run the partitioner and so makes no report. Therefore each new report is also
written beside Inductor's cache, under a key made from the graph that Dynamo captured, and a hit
reads it back. Clearing the cache clears both.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mstpass.plain_data import replace_text
from mstpass.report.publish import publish
from mstpass.report.report import Report
from mstpass.torch_internals.caches import cache_folder

log = logging.getLogger(__name__)

_REPORTS: list[Report] = []


def reports() -> list[Report]:
    """The reports of the graphs compiled in this process, cache hits included, oldest first."""
    return list(_REPORTS)


def keep(report: Report, *seconds: Mapping[str, float]) -> None:
    """Keep a report in memory and publish it (publish.py).

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
