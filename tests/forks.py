"""Programs that tests run in processes of their own, forked from one that has imported torch.

To import torch, Inductor and transformers takes longer than most programs of tests do. A process
that has imported them, and done nothing else, forks the others: each begins as a new one does. A
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
import types
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


def run_python(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 300
) -> Done:
    """As ``python *command`` would, in the root of the repository.

    Args:
        command: a script, or ``-m`` and a module, or ``-c`` and code, with its arguments.
        env: what the environment has more, or has otherwise.
    """
    (done,) = _run([command], [env or {}], timeout_s)
    return done


def run_ranks_of(command: Sequence[str], ranks: int, timeout_s: float = 900) -> list[Done]:
    """As ``torchrun --nproc-per-node`` would: what each rank printed.

    A rank has one thread. When one fails, the others, which may wait for it, are ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    group |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    envs = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _run([command] * ranks, envs, timeout_s)


def _run(
    commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], timeout_s: float
) -> list[Done]:
    with tempfile.TemporaryDirectory(prefix="mstpass-forks-") as name:
        folders = [Path(name, str(place)) for place in range(len(commands))]
        processes = [
            _forks.Process(target=_become, args=(command, {**os.environ, **env}, folder))
            for command, env, folder in zip(commands, envs, folders, strict=True)
        ]
        for process, folder in zip(processes, folders, strict=True):
            folder.mkdir()
            process.start()
        end = time.monotonic() + timeout_s
        while alive := [process for process in processes if process.is_alive()]:
            if time.monotonic() > end or any(process.exitcode for process in processes):
                for process in alive:
                    process.kill()
            wait([process.sentinel for process in alive], timeout=1)
        return [
            Done(
                command,
                process.exitcode or 0,
                *((folder / file).read_text(errors="replace") for file in ("stdout", "stderr")),
            )
            for command, process, folder in zip(commands, processes, folders, strict=True)
        ]


def _become(command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
    """In the forked process: what ``python *command`` does."""
    for number, file in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(folder / file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    first, *rest = command
    try:
        if first == "-c":
            program = types.ModuleType("__main__")
            sys.modules["__main__"], sys.argv = program, ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), vars(program))
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*command]
            runpy.run_path(first, run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
