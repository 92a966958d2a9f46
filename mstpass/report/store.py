"""The reports of this process, and of graphs that come from a compile cache.

A cache hit does not run the partitioner and so makes no report. Therefore each new report is also
written beside Inductor's cache, under a key made from the graph that Dynamo captured, and a hit
reads it back. Clearing the cache clears both.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mstpass.report.publish import publish
from mstpass.report.report import Report
from mstpass.torch_internals.compile_artifacts import cache_folder

log = logging.getLogger(__name__)

_REPORTS: list[Report] = []


def reports() -> list[Report]:
    """The reports of the graphs compiled in this process, cache hits included, oldest first."""
    return list(_REPORTS)


def keep(report: Report, seconds: Mapping[str, float] | None = None) -> None:
    """Keep a report in memory and publish it (publish.py).

    Args:
        seconds: the time of each stage of planning.
    """
    _REPORTS.append(report)
    publish(report, seconds or {})


def add(
    report: Report, key: str, path: str | None = None, seconds: Mapping[str, float] | None = None
) -> None:
    """Keep and publish a new report; write it beside the compile cache and to the user's path.

    Args:
        key: from `graph_key`.
        path: of the option ``report``; a number is added to it if the file exists.
        seconds: the time of each stage of planning.
    """
    keep(report, seconds)
    remember(report, key)
    if path is not None:
        target = Path(path)
        number = 1
        while target.exists():
            number += 1
            target = Path(path).with_stem(f"{Path(path).stem}-{number}")
        _write(report, target)


def remember(report: Report, key: str) -> None:
    """Write a report beside the compile cache, for `recall`; `reports` does not show it."""
    _write(report, _file(key))


def add_nested(reports: Sequence[Report], key: str, path: str | None = None) -> None:
    """`add` the reports of the regions that a graph calls, in front of the graph's own."""
    for number, report in enumerate(reports):
        add(report, _nested_key(key, number), path)


def recall_nested(key: str) -> list[Report]:
    """`recall` what `add_nested` wrote for the graph of this key."""
    recalled = (recall(_nested_key(key, number)) for number in itertools.count())
    return list(itertools.takewhile(lambda report: report is not None, recalled))  # type: ignore


def _nested_key(key: str, number: int) -> str:
    return f"{key}-nested-{number}"


def recall(key: str) -> Report | None:
    """The report that an earlier process wrote beside the compile cache; None if there is none."""
    try:
        return Report.from_json(_file(key), cached=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _write(report: Report, path: Path) -> None:
    """Write the whole file or nothing. A failure is logged and does not stop a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        report.to_json(temporary)
        os.replace(temporary, path)
    except OSError as error:
        log.warning("mstpass could not write a report to %s: %s", path, error)
