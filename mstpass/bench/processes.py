"""Calls a function in a new process, or on several ranks, with plain data in and out.

    python -m mstpass.bench.processes MODULE FUNCTION FOLDER

FOLDER has the arguments as ``given.json``; each rank writes what the function returns to a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mstpass.errors import UserError

ROOT = Path(__file__).parents[2]
_ERROR_CHARS = 3000


class ProcessFailed(UserError):
    """A process failed.

    Attributes:
        why: the error that it printed last, on one line.
    """

    def __init__(self, what: str, stderr: str):
        super().__init__(f"{what} failed:\n{stderr[-_ERROR_CHARS:]}")
        self.why = last_error(stderr)


class TimedOut(ProcessFailed):
    """A process took too long."""


def last_error(text: str) -> str:
    """The last line that names an error, else the last line; empty for an empty text."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return (named or lines or [""])[-1].strip()


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which this very package is imported, also from another folder."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def call(
    what: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    ranks: int | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """What a function of a module returns in a new process: a list with one result for each rank.

    Args:
        what: names the process in an error.
        given: the arguments, as plain data.
        ranks: None: one process outside of any group. Each rank has one thread.

    Raises:
        ProcessFailed: it failed, or took too long.
    """
    launch, one_thread = ["-m"], {}
    if ranks is not None:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        one_thread = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
        Path(folder, "given.json").write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, *launch, __name__]
        # a file: what a process has started may hold a pipe open, and its end would not be seen
        with Path(folder, "errors.txt").open("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [*command, function.__module__, function.__name__, folder],
                env=with_package({**os.environ, **one_thread, **(environment or {})}),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # to end it with all that it has started
            )
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise TimedOut(what, f"it took more than {timeout_s:.0f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            if status:
                raise ProcessFailed(what, errors.read() or f"exit status {status}")
        files = (Path(folder, f"{rank}.json") for rank in range(ranks or 1))
        return [json.loads(file.read_text("utf-8")) for file in files]


def _main(module: str, function: str, folder: str) -> None:
    given = json.loads(Path(folder, "given.json").read_text("utf-8"))
    rank, in_group = 0, "RANK" in os.environ
    called = getattr(importlib.import_module(module), function)
    if in_group:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    Path(folder, f"{rank}.json").write_text(json.dumps(called(**given)), encoding="utf-8")
    if in_group:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
