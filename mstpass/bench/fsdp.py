"""`mstpass bench fsdp`: a Llama-like step under FSDP2, on two ranks of one thread each."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command
from mstpass.bench.comparison import INDUCTOR, MST, Row, ratios, records
from mstpass.bench.fsdp_rank import BY_BLOCK
from mstpass.bench.models import LlamaSize
from mstpass.bench.tables import Result, Table, Target
from mstpass.errors import UserError

RANKS = 2
PEAK_LIMIT, TIME_LIMIT = 0.45, 1.02
SIZES = (LlamaSize(length=2048), LlamaSize(length=4096))
QUICK = (LlamaSize(64, 2, 2, 256, 4096, 512),)
_ROOT = Path(__file__).parents[2]
_DESCRIPTION = """\
Measure the peak memory of a rank and the time of a Llama-like step under
FSDP2, on two processes of one thread each: eager, Inductor and mst, with the
whole module compiled, and with blocks and head compiled one by one, for 2,048
and for 4,096 tokens a rank."""
EXAMPLES = """  mstpass bench fsdp
  mstpass bench fsdp --repeats 9 --markdown docs/results/fsdp.md
"""


def run(arguments: Arguments) -> Result:
    if arguments.device.type != "cpu":
        raise UserError("mstpass bench fsdp measures on the CPU: add --device cpu")
    result = Result("fsdp", f"A Llama-like step under FSDP2, {RANKS} ranks")
    for size in QUICK if arguments.quick else SIZES:
        rows = {row.name: row for row in slowest_and_highest(of_ranks(size, arguments.repeats))}
        _add(result, rows, size)
    result.notes += [
        "Loss and gradients equal eager's. Each rank has a batch of its own and one thread. Peak: "
        "that of the rank with the higher one. Time: of the rank that takes longer; median ratio "
        "over interleaved rounds (least-greatest). Ratios are to Inductor in the same way. The "
        "last row is what FSDP2 itself needs: sharded and gathered weights, and their gradients."
    ]
    return result


def _add(result: Result, rows: dict[str, Row], size: LlamaSize) -> None:
    """Add what was measured for one size."""
    tokens = f"N={size.batch * size.length}"
    result.tables.append(_table(rows, f"{size}, a rank"))
    for way in ("", BY_BLOCK):
        ours, base = rows[MST + way], rows[INDUCTOR + way]
        ratio = ratios(ours, base)
        peak = tables.quotient(ours.peak_bytes, base.peak_bytes)
        names = f"{ours.name}: {{}} / {base.name}, {tokens}"
        result.targets += [
            Target(names.format("peak"), peak, PEAK_LIMIT),
            Target(names.format("time"), ratio and ratio[0], TIME_LIMIT),
        ]
    result.notes += (f"{row.name}, {tokens}: {row.plan}." for row in rows.values() if row.plan)
    result.records[tokens] = records(rows)


def of_ranks(size: LlamaSize, repeats: int) -> list[list[Row]]:
    """The rows of each rank.

    Raises:
        UserError: a rank failed.
    """
    job = json.dumps({"size": dataclasses.asdict(size), "repeats": repeats})
    one_thread = {"OMP_NUM_THREADS": "1"}
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        done = subprocess.run(
            [sys.executable, *launch, "-m", "mstpass.bench.fsdp_rank", folder, job],
            env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"mstpass bench fsdp: a rank failed:\n{done.stderr[-3000:]}")
        texts = [Path(folder, f"{rank}.json").read_text("utf-8") for rank in range(RANKS)]
    return [[Row(**fields) for fields in json.loads(text)] for text in texts]


def slowest_and_highest(by_rank: list[list[Row]]) -> list[Row]:
    """Of each way, the higher peak of the ranks, and in each round the longer time."""
    return [
        dataclasses.replace(
            each[0],
            peak_bytes=max(row.peak_bytes or 0 for row in each),
            gradient_error=max(row.gradient_error or 0.0 for row in each),
            seconds=[max(times) for times in zip(*(row.seconds for row in each), strict=True)],
        )
        for each in zip(*by_rank, strict=True)
    ]


def _table(rows: dict[str, Row], title: str) -> Table:
    lines = []
    for row in rows.values():
        base = rows[INDUCTOR + (BY_BLOCK if row.name.endswith(BY_BLOCK) else "")]
        lines.append(
            (
                row.name,
                tables.mib_cell(row.peak_bytes),
                tables.times_cell(tables.quotient(row.peak_bytes, base.peak_bytes)),
                tables.seconds_cell(row.median_s),
                tables.ratio_cell(ratios(row, base)),
            )
        )
    columns = ("", "peak MiB of a rank", "peak / Inductor", "time s", "time / Inductor")
    return Table(title, columns, tuple(lines))


main = Command("fsdp", (run,), _DESCRIPTION, EXAMPLES)
