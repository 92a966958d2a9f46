"""`mstpass bench compile`: seconds to compile a Llama-like step, cold and from the caches.

Each measurement runs in a new process. The process first compiles a small function, so that the
time of imports, compiler checks and precompiled headers does not count. Then it runs the model's
first step. The compile time is the time of that step beyond a later step. *Cold*: the cache folder
is empty. *Warm*: a second process uses the cache folder that a first one has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mstpass.bench import planning_time, tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import INDUCTOR, MST, Row, ratios
from mstpass.bench.models import LlamaSize, Step, llama
from mstpass.bench.tables import Result, Table, Target

LIMIT = 1.15
SAME = 1.10  # the compile time must not depend on the number of chunks, but for noise
LAYERS, CHUNKS = (2, 16), (4, 64)
SIZE = LlamaSize(width=128, heads=2, mlp_width=512, length=1024)
QUICK = LlamaSize(width=64, heads=2, mlp_width=256, length=256, vocabulary=2048)
_TIMEOUT_S = 900
_ERROR_CHARS = 110
_DESCRIPTION = """\
Measure the compile time of a Llama-like step, cold and from the caches, by
depth and by number of chunks, in a new process each time; and the CPU time
of mst's planning by depth."""
EXAMPLES = """  mstpass bench compile
  mstpass bench compile --repeats 5 --json /tmp/compile.json
"""


@dataclass(frozen=True)
class Case:
    """A backend and a model to compile. With None for `chunks`, mst chooses their number."""

    backend: str
    size: LlamaSize
    chunks: int | None = None

    @property
    def name(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks else ""
        return f"{self.backend}, {self.size.layers} layers{chunks}"

    def compile(self, fn: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if self.backend == INDUCTOR:
            return torch.compile(fn)
        length = self.size.length // self.chunks if self.chunks else None
        options: dict[str, Any] = {"strict": True, "chunk_tokens": length}
        return torch.compile(fn, backend="mst", options=options)


@dataclass
class Seconds(Row):
    """A row whose seconds are compile times.

    Attributes:
        warm_s: compile time with a filled cache folder.
        hits: cache hits of that run, as text.
    """

    hits: str = ""
    warm_s: float | None = None


def run(arguments: Arguments) -> Result:
    size = QUICK if arguments.quick else SIZE
    cases = _cases(size, (1, 2) if arguments.quick else LAYERS)
    rows = {case.name: Seconds(case.name) for case in cases}
    with Progress("compile", len(cases) * (arguments.repeats + 1)) as advance:
        for number in range(arguments.repeats):
            for case in cases:
                _measure(case, rows[case.name], arguments.device, warm=number == 0)
                advance(case.name)
                if number == 0:
                    advance(case.name)
    shape = f"d={size.width}, l={size.mlp_width}, V={size.vocabulary}, N={size.length}, fp32"
    result = Result("compile", f"Compile time of a Llama-like step: {shape}")
    result.tables.append(_table(cases, rows))
    result.targets += _targets(cases, rows)
    result.notes.append(
        "Seconds of the first forward and backward beyond a later one, in a new process that has "
        "compiled a small function before. Cold: with an empty cache folder. Warm: in a second "
        "process, with the first one's cache folder. Ratios: to Inductor at the same depth, median "
        "of the rounds (least-greatest)."
    )
    result.records["rows"] = [vars(row) for row in rows.values()]
    return result


def _cases(size: LlamaSize, depths: Sequence[int]) -> list[Case]:
    sized = [LlamaSize(**{**asdict(size), "layers": depth}) for depth in depths]
    plain = [Case(backend, each) for each in sized for backend in (INDUCTOR, MST)]
    return plain + [Case(MST, sized[0], chunks) for chunks in CHUNKS]


def _table(cases: Sequence[Case], rows: dict[str, Seconds]) -> Table:
    lines = []
    for case in cases:
        row, base = rows[case.name], rows[Case(INDUCTOR, case.size).name]
        lines.append(
            (
                row.name,
                tables.seconds_cell(row.median_s),
                row.error or tables.ratio_cell(ratios(row, base)),
                tables.seconds_cell(row.warm_s),
                row.hits,
            )
        )
    columns = ("", "cold s", "cold / Inductor", "warm s", "warm: cache hits")
    return Table("first step", columns, tuple(lines))


def _targets(cases: Sequence[Case], rows: dict[str, Seconds]) -> list[Target]:
    targets = []
    for case in cases:
        if case.backend == MST and case.chunks is None:
            ratio = ratios(rows[case.name], rows[Case(INDUCTOR, case.size).name])
            what = f"{case.size.layers} layers: compile time / Inductor"
            targets.append(Target(what, ratio and ratio[0], LIMIT))
    few, many = (rows[case.name] for case in cases if case.chunks)
    ratio = ratios(many, few)
    what = f"compile time of {CHUNKS[1]} / {CHUNKS[0]} chunks"
    return [*targets, Target(what, ratio and ratio[0], SAME)]


def _measure(case: Case, row: Seconds, device: torch.device, warm: bool) -> None:
    if row.error:
        return
    with tempfile.TemporaryDirectory(prefix="mstpass-bench-") as folder:
        try:
            row.seconds.append(_process(case, device, folder)["compile_s"])
            if warm:
                second = _process(case, device, folder)
                row.warm_s, hits = second["compile_s"], second["hits"]
                row.hits = (
                    f"autograd {hits['autograd']}, fx {hits['fx']}, reports {hits['reports']}"
                )
        except (RuntimeError, subprocess.SubprocessError) as error:
            row.error = str(error)[:_ERROR_CHARS]


def _process(case: Case, device: torch.device, folder: str) -> dict[str, Any]:
    """Measure one case in a new process, which keeps its caches in `folder`."""
    worker = [sys.executable, "-m", "mstpass.bench.compile", "--worker", device.type]
    done = subprocess.run(
        [*worker, json.dumps(asdict(case))],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        named = [line for line in lines if "Error:" in line and not line.startswith(" ")]
        raise RuntimeError((named or lines or ["no output"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _work(device: torch.device, case: Case) -> dict[str, Any]:
    """Measure one case; this runs in the new process."""
    _warm_up(device)
    import mstpass
    from mstpass.torch_internals.caches import counters

    model, ids_BS, target_BS = llama(case.size, device)
    step = Step(case.compile(lambda: model(ids_BS, target_BS)), list(model.parameters()))
    counters.clear()
    first_s = _seconds(step)
    later_s = min(_seconds(step) for _ in range(3))
    hits = {
        "autograd": counters["aot_autograd"]["autograd_cache_hit"],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
        "reports": len(mstpass.reports()),
    }
    return {"compile_s": first_s - later_s, "later_s": later_s, "hits": hits}


def _warm_up(device: torch.device) -> None:
    """Compile a small function: this loads modules, checks the compiler, and starts workers."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    torch.compile(lambda: (x @ x).sin().sum())().backward()


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step().item()
    return time.perf_counter() - start


def _worker(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("case")
    given = parser.parse_args(argv)
    case = json.loads(given.case)
    size = LlamaSize(**case.pop("size"))
    print(json.dumps(_work(torch.device(given.worker), Case(size=size, **case))))


main = Command("compile", (run, planning_time.run), _DESCRIPTION, EXAMPLES)


if __name__ == "__main__":  # the process of one measurement
    _worker(sys.argv[1:])
