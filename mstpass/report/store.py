"""The reports of this process, and of graphs that come from a compile cache.

A cache hit does not run the partitioner, so a report is also written beside Inductor's cache, under
a key made of what Dynamo captured; a hit reads it back. Clearing the cache clears both.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir

from mstpass.report.publish import announce
from mstpass.report.report import Report

log = logging.getLogger(__name__)

_REPORTS: list[Report] = []


def reports() -> list[Report]:
    """The reports of the graphs compiled in this process, cache hits included, oldest first."""
    return list(_REPORTS)


def keep(report: Report, seconds: Mapping[str, float] | None = None) -> None:
    """Keep a report in memory and announce it; ``seconds`` of each stage of planning."""
    _REPORTS.append(report)
    announce(report, seconds or {})


def add(
    report: Report, key: str, path: str | None = None, seconds: Mapping[str, float] | None = None
) -> None:
    """Keep a new report: in memory, beside the compile cache, and at the user's path; announce it.

    Args:
        seconds: of each stage of planning.
    """
    keep(report, seconds)
    _write(report, _file(key))
    if path is not None:
        target = Path(path)
        number = 1
        while target.exists():
            number += 1
            target = Path(path).with_stem(f"{Path(path).stem}-{number}")
        _write(report, target)


def recall(key: str) -> Report | None:
    """The report of a graph that the compile cache may have, where it lies beside it."""
    try:
        return Report.from_json(_file(key), cached=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.debug("no report beside the compile cache for this graph: %s", error)
        return None


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any], salt: str) -> str:
    """Names a Dynamo graph across processes: its code, its inputs' metadata, the modes in force."""
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
    return Path(cache_dir()) / "mstpass" / f"{key}.json"


def _write(report: Report, path: Path) -> None:
    """Whole or not at all; a report that cannot be written must not stop a compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        report.to_json(temporary)
        os.replace(temporary, path)
    except OSError as error:
        log.warning("mstpass could not write a report to %s: %s", path, error)
