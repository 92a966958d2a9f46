"""Measure the compile time of a Llama-like step, cold and from the caches, by
depth and by number of chunks, in a new process each time; and the CPU time
of mst's planning by depth.

Each measurement runs in a new process. The process first compiles a small function, so that the
time of imports, compiler checks and precompiled headers does not count. Then it runs the model's
first step. The compile time is the time of that step beyond a later step. *Cold*: the cache folder
is empty. *Warm*: a second process uses the cache folder that a first one has filled.

For the time of planning, the joint graph is traced, not compiled. CPU time of the process is
measured, so that other work on the machine does not count. The fastest of several runs counts.

examples:
  mstpass bench compile
  mstpass bench compile --repeats 5 --json /tmp/compile.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

import mstpass
from mstpass import pipeline
from mstpass.bench import processes, results
from mstpass.bench.comparison import INDUCTOR, MST, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.models import LlamaSize, LossFn, Work, llama
from mstpass.bench.results import Result, Row, Table, Target, quotient, seconds_cell
from mstpass.options import Options
from mstpass.torch_internals.caches import counters
from mstpass.tracing.joint_graphs import trace_joint

PLANNING_LIMIT_S, LIMIT_DEPTH = 2.0, 64
LINEAR = 1.3  # the time may grow by this factor more than the depth
PLANNED_LAYERS = (8, 16, 32, 64, 128)
PLANNED = LlamaSize(width=128, heads=4, mlp_width=352, vocabulary=8000, length=1024)
QUICK_PLANNED = LlamaSize(width=32, heads=2, mlp_width=128, vocabulary=600, length=640)


@dataclass(frozen=True)
class PlanningRow:
    """CPU seconds to plan a graph of one depth."""

    layers: int
    nodes: int
    seconds: float


def run_planning(arguments: Arguments) -> Result:
    size, depths = (QUICK_PLANNED, (1, 2)) if arguments.quick else (PLANNED, PLANNED_LAYERS)
    rows = []
    with advancing("planning", len(depths)) as advance:
        for depth in depths:
            rows.append(planned(replace(size, layers=depth), arguments))
            advance(f"{depth} layers")
    shape = f"d={size.width}, l={size.mlp_width}, V={size.vocabulary}, N={size.length}, fp32"
    result = Result("planning", f"Planning a Llama-like step by its depth: {shape}")
    columns: dict[str, Callable[[PlanningRow], str]] = {
        "": lambda row: f"{row.layers} layers",
        "nodes": lambda row: str(row.nodes),
        "CPU s": lambda row: seconds_cell(row.seconds),
    }
    result.tables.append(Table.of("planning", rows, columns))
    first, last = rows[0], rows[-1]
    result.targets += [
        Target(f"{row.layers} layers: planning, s", row.seconds, PLANNING_LIMIT_S)
        for row in rows
        if row.layers == LIMIT_DEPTH
    ]
    what = f"planning time of {last.layers} / {first.layers} layers"
    limit = LINEAR * last.layers / first.layers
    result.targets.append(Target(what, quotient(last.seconds, first.seconds), limit))
    result.notes.append(
        "CPU seconds to read the joint graph of forward and backward, to find its regions and to "
        f"plan, default options; the fastest of {arguments.repeats}."
    )
    result.records["rows"] = [asdict(row) for row in rows]
    return result


def planned(size: LlamaSize, arguments: Arguments) -> PlanningRow:
    model, ids_BS, target_BS = llama(size, arguments.device)

    def take(module: fx.GraphModule, num_fwd_outputs: int) -> PlanningRow:
        seconds = []
        for _ in range(arguments.repeats):
            start = time.process_time()
            pipeline.run(
                module, Options.parse({}), num_fwd_outputs=num_fwd_outputs, stop_after="plan"
            )
            seconds.append(time.process_time() - start)
        return PlanningRow(size.layers, len(module.graph.nodes), min(seconds))

    return trace_joint(model, (ids_BS, target_BS), take)


# ---- compile time --------------------------------------------------------------------------------
LIMIT = 1.15
SAME = 1.10  # the compile time must not depend on the number of chunks, but for noise
LAYERS, CHUNKS = (2, 16), (4, 64)
SIZE = LlamaSize(width=128, heads=2, mlp_width=512, length=1024)
QUICK = LlamaSize(width=64, heads=2, mlp_width=256, length=256, vocabulary=2048)
_TIMEOUT_S = 900
_ERROR_CHARS = 110


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

    def compile(self, fn: LossFn) -> LossFn:
        length = self.size.length // self.chunks if self.chunks else None
        return (inductor() if self.backend == INDUCTOR else mst(chunk_tokens=length)).build(fn)


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
    with advancing("compile", len(cases) * (arguments.repeats + 1)) as advance:
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
    sized = [replace(size, layers=depth) for depth in depths]
    plain = [Case(backend, each) for each in sized for backend in (INDUCTOR, MST)]
    return plain + [Case(MST, sized[0], chunks) for chunks in CHUNKS]


def _table(cases: Sequence[Case], rows: dict[str, Seconds]) -> Table:
    bases = {case.name: rows[Case(INDUCTOR, case.size).name] for case in cases}
    columns: dict[str, Callable[[Seconds], str]] = {
        "": lambda row: row.name,
        "cold s": lambda row: results.seconds_cell(row.median_s),
        "cold / Inductor": lambda row: (
            row.error or results.ratio_cell(results.ratios(row, bases[row.name]))
        ),
        "warm s": lambda row: results.seconds_cell(row.warm_s),
        "warm: cache hits": lambda row: row.hits,
    }
    return Table.of("first step", rows.values(), columns)


def _targets(cases: Sequence[Case], rows: dict[str, Seconds]) -> list[Target]:
    targets = []
    for case in cases:
        if case.backend == MST and case.chunks is None:
            ratio = results.time_ratio(rows[case.name], rows[Case(INDUCTOR, case.size).name])
            what = f"{case.size.layers} layers: compile time / Inductor"
            targets.append(Target(what, ratio, LIMIT))
    few, many = (rows[case.name] for case in cases if case.chunks)
    what = f"compile time of {CHUNKS[1]} / {CHUNKS[0]} chunks"
    return [*targets, Target(what, results.time_ratio(many, few), SAME)]


def _measure(case: Case, row: Seconds, device: torch.device, warm: bool) -> None:
    if row.error:
        return
    with tempfile.TemporaryDirectory(prefix="mstpass-bench-") as folder:
        try:
            row.seconds.append(_process(case, device, folder)["compile_s"])
            if warm:
                second = _process(case, device, folder)
                row.warm_s = second["compile_s"]
                row.hits = ", ".join(f"{what} {count}" for what, count in second["hits"].items())
        except processes.ProcessFailed as error:
            row.error = error.why[:_ERROR_CHARS]


def _process(case: Case, device: torch.device, folder: str) -> dict[str, Any]:
    """Measure one case in a new process, which keeps its caches in `folder`."""
    given = {"device": device.type, "case": asdict(case)}
    cache = {"TORCHINDUCTOR_CACHE_DIR": folder}
    (found,) = processes.call(case.name, work, given, environment=cache, timeout_s=_TIMEOUT_S)
    return found


def work(device: str, case: dict[str, Any]) -> dict[str, Any]:
    """Measure one case; this runs in the new process."""
    size, place = LlamaSize(**case["size"]), torch.device(device)
    _warm_up(place)
    model, ids_BS, target_BS = llama(size, place)
    work = Work.of(model, lambda: model(ids_BS, target_BS))
    step = work.step(Case(**{**case, "size": size}).compile(work.fn))
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


def _seconds(step: LossFn) -> float:
    start = time.perf_counter()
    step().item()
    return time.perf_counter() - start


main = Benchmark("compile", (run, run_planning), __doc__)
