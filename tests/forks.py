"""Ranks of a program, forked from a process that has imported torch.

To import torch, Inductor and transformers takes longer than most programs of tests do. A process
that has imported them, and done nothing else, forks the ranks: each begins as a new process does. A
program that is about the import, or about what is read then (``TORCH_LOGS``), is run by
``subprocess`` instead.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
_IMPORTED = (
    *("torch._inductor.compile_fx", "torch._dynamo.backends.registry", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "mstpass.backend"),
    *("transformers.trainer", "transformers.models.llama.modeling_llama"),
)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([*_IMPORTED])

Done = subprocess.CompletedProcess[str]


def run_ranks_of(program: Sequence[str], ranks: int, timeout_s: float = 900) -> list[Done]:
    """What each rank printed, as ``torchrun --nproc-per-node RANKS -m *program`` would run it.

    A rank has one thread. When one fails, the others, which may wait for it, are ended.

    Args:
        program: a module, and its arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    group |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="mstpass-forks-") as name:
        folders = [Path(name, str(rank)) for rank in range(ranks)]
        processes = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            env = {**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(_forks.Process(target=_become, args=(program, env, folder)))
            processes[-1].start()
        end = time.monotonic() + timeout_s
        while alive := [process for process in processes if process.is_alive()]:
            is_late = time.monotonic() > end
            if is_late or any(process.exitcode for process in processes):
                for process in alive:
                    process.kill()
            if is_late:
                raise subprocess.TimeoutExpired([*program], timeout_s)
            wait([process.sentinel for process in alive], timeout=1)
        return [
            Done(
                program, process.exitcode or 0, *map(_text, (folder / "stdout", folder / "stderr"))
            )
            for process, folder in zip(processes, folders, strict=True)
        ]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _become(program: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
    """In the forked process: what ``python -m *program`` does."""
    for number, file in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(folder / file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [*program]
    try:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
