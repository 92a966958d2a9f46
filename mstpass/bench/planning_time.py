"""CPU seconds of mst's own planning, by the depth of the model; a part of `mstpass bench compile`.

The joint graph is traced, not compiled. CPU time of the process is measured, so that other work on
the machine does not count. The fastest of several runs counts.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from mstpass import pipeline
from mstpass.bench.harness import Arguments, Progress
from mstpass.bench.models import LlamaSize, llama
from mstpass.bench.results import Result, Table, Target, quotient, seconds_cell
from mstpass.graph.joint import JointGraph
from mstpass.options import Options
from mstpass.tracing.joint_graphs import trace_joint

LIMIT_S, LIMIT_DEPTH = 2.0, 64
LINEAR = 1.3  # the time may grow by this factor more than the depth
LAYERS = (8, 16, 32, 64, 128)
SIZE = LlamaSize(width=128, heads=4, mlp_width=352, vocabulary=8000, length=1024)
QUICK = LlamaSize(width=32, heads=2, mlp_width=128, vocabulary=600, length=640)


@dataclass(frozen=True)
class Row:
    """CPU seconds to read the graph, to detect its regions, and to plan, for one depth."""

    layers: int
    nodes: int
    read_s: float
    detect_s: float
    plan_s: float

    @property
    def total_s(self) -> float:
        return self.read_s + self.detect_s + self.plan_s


def run(arguments: Arguments) -> Result:
    size, depths = (QUICK, (1, 2)) if arguments.quick else (SIZE, LAYERS)
    rows = []
    with Progress("planning", len(depths)) as advance:
        for depth in depths:
            rows.append(measured(dataclasses.replace(size, layers=depth), arguments))
            advance(f"{depth} layers")
    shape = f"d={size.width}, l={size.mlp_width}, V={size.vocabulary}, N={size.length}, fp32"
    result = Result("planning", f"Planning a Llama-like step by its depth: {shape}")
    result.tables.append(_table(rows))
    result.targets += _targets(rows)
    result.notes.append(
        "CPU seconds of mst's own stages for the joint graph of forward and backward, default "
        f"options; the fastest of {arguments.repeats}."
    )
    result.records["rows"] = [dataclasses.asdict(row) for row in rows]
    return result


def measured(size: LlamaSize, arguments: Arguments) -> Row:
    model, ids_BS, target_BS = llama(size, arguments.device)

    def take(module: fx.GraphModule, num_fwd_outputs: int) -> Row:
        runs = [_seconds(module, num_fwd_outputs) for _ in range(arguments.repeats)]
        read_s, detected_s, planned_s = min(runs, key=lambda seconds: seconds[-1])
        nodes = len(module.graph.nodes)
        return Row(size.layers, nodes, read_s, detected_s - read_s, planned_s - detected_s)

    return trace_joint(model, (ids_BS, target_BS), take)


def _seconds(module: fx.GraphModule, num_fwd_outputs: int) -> list[float]:
    """CPU seconds until the end of each stage."""
    run = functools.partial(
        pipeline.run, module, Options.parse({}), num_fwd_outputs=num_fwd_outputs
    )
    seconds = []
    for stage in (
        functools.partial(JointGraph, module, num_fwd_outputs),
        functools.partial(run, stop_after="detect"),
        functools.partial(run, stop_after="plan"),
    ):
        start = time.process_time()
        stage()
        seconds.append(time.process_time() - start)
    return seconds


def _table(rows: Sequence[Row]) -> Table:
    columns = {
        "": lambda row: f"{row.layers} layers",
        "nodes": lambda row: str(row.nodes),
        "read s": lambda row: seconds_cell(row.read_s),
        "detect s": lambda row: seconds_cell(row.detect_s),
        "plan s": lambda row: seconds_cell(row.plan_s),
        "all s": lambda row: seconds_cell(row.total_s),
    }
    return Table.of("planning", rows, columns)


def _targets(rows: Sequence[Row]) -> list[Target]:
    first, last = rows[0], rows[-1]
    growth = last.layers / first.layers
    what = f"planning time of {last.layers} / {first.layers} layers"
    ratio = quotient(last.total_s, first.total_s)
    deep = [row for row in rows if row.layers == LIMIT_DEPTH]
    targets = [Target(f"{row.layers} layers: planning, s", row.total_s, LIMIT_S) for row in deep]
    return [*targets, Target(what, ratio, LINEAR * growth)]
