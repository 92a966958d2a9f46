"""Runs a program on several ranks, and reads what each rank found.

Compiling takes most of the time, so one program runs several cases. A case is a function of its
module without arguments, or one of the module's CASES, which take the mesh of all ranks; it returns
plain data for JSON. The ranks of a case meet before the next one.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.checks import op_by_op
from tests.forks import run_ranks_of

Found = dict[str, list[dict[str, Any]]]  # by case, the result of each rank
_MEETING = datetime.timedelta(seconds=600)  # of a busy machine, whose ranks compile


def run_ranks(
    module: str, cases: Sequence[str], ranks: int = 2, kernels: Sequence[str] = ()
) -> Found:
    """What each case of ``tests/ranks/<module>.py`` returned.

    Args:
        kernels: the cases that compile kernels in every run; the others do so under ``--all``.
    """
    with tempfile.TemporaryDirectory(prefix="mstpass-ranks-") as folder:
        program = ["tests.ranks.launch", folder, module, ",".join(kernels), *cases]
        done = run_ranks_of(program, ranks)
        printed = "\n".join(f"{each.stdout[-2000:]}\n{each.stderr[-6000:]}" for each in done)
        assert not any(each.returncode for each in done), printed
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        by_rank = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {case: [results[case] for results in by_rank] for case in cases}


def _case(program: ModuleType, name: str) -> Callable[[], dict[str, Any]]:
    if name not in getattr(program, "CASES", ()):
        found: Callable[[], dict[str, Any]] = getattr(program, name)
        return found
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return functools.partial(program.CASES[name], mesh)


def main(folder: str, module: str, kernels: str, *cases: str) -> None:
    dist.init_process_group("gloo", timeout=_MEETING)
    found: dict[str, Any] = {}
    program = importlib.import_module(f"tests.ranks.{module}")
    for case in cases:
        torch.manual_seed(0)
        torch.compiler.reset()
        whole = case in kernels.split(",")
        with contextlib.nullcontext() if whole else op_by_op():
            found[case] = _case(program, case)()  # an error ends all ranks: none waits for it
        dist.barrier()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
