"""`mstpass bench sharded`: an LM head whose vocabulary two processes share, under `loss_parallel`.

The *floor* of a rank is the memory that no loop can avoid: the gradient of its share of the weight,
the gradient of the input, and one chunk of its share of the logits, as long as mst's chunks are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import INDUCTOR, MST, Row, ratios
from mstpass.bench.sharded_rank import LEAST
from mstpass.bench.tables import Result, Table, Target
from mstpass.errors import UserError

PEAK_LIMIT = 1.10
RANKS = 2
_TIMEOUT_S = 1800
_DESCRIPTION = """\
Measure an LM head whose vocabulary is sharded over two processes on the CPU:
step time against Inductor without chunks, and the peak of a rank against its
floor, which is the memory that no loop can avoid."""
EXAMPLES = """  mstpass bench sharded
  mstpass bench sharded --repeats 3 --markdown docs/results/losses.md
"""


def run(arguments: Arguments) -> Result:
    tokens, width, vocabulary = sizes(arguments.quick)
    with Progress("sharded", 1) as advance:
        found = _measure(tokens, width, vocabulary, arguments.repeats)
        advance("")
    rows = {row["name"]: Row(**row) for row in found["rows"]}
    floors = {name: _floor(row, tokens, width, vocabulary) for name, row in rows.items()}
    title = f"A head on {RANKS} ranks: N={tokens}, d={width}, V={vocabulary}, fp32, gloo"
    result = Result("sharded", title)
    columns = ("contender", "plan", "time / Inductor", "MiB of a rank", "peak / floor")
    lines = tuple(_line(row, rows[INDUCTOR], floors[name]) for name, row in rows.items())
    result.tables.append(Table("sharded", columns, lines))
    for name in (MST, LEAST):
        relative = tables.quotient(rows[name].peak_bytes, floors[name])
        result.targets.append(Target(f"{name}: peak / floor", relative, PEAK_LIMIT))
    result.notes.append(
        "Time: median ratio over interleaved rounds (least-greatest). Floor: gradient of the "
        "rank's share of the weight + input gradient + one chunk of its share of the logits. The "
        "logits are computed twice, because the maximum and the sum of all ranks are known only "
        "after the first time."
    )
    result.records.update(found)
    return result


def sizes(quick: bool) -> tuple[int, int, int]:
    """Tokens, width and vocabulary of the head."""
    return (512, 64, 4096) if quick else (2048, 256, 32_000)


def _floor(row: Row, tokens: int, width: int, vocabulary: int) -> int | None:
    """Bytes of a rank that no loop can avoid, in float32; None for a row without loops."""
    if " in " not in row.plan:
        return None
    chunks, share = int(row.plan.rpartition(" in ")[2]), -(-vocabulary // RANKS)
    return 4 * (share * width + tokens * width + -(-tokens // chunks) * share)


def _line(row: Row, base: Row, floor: int | None) -> tuple[str, ...]:
    return (
        row.name,
        row.error or row.plan or "-",
        tables.ratio_cell(ratios(row, base)),
        tables.mib_cell(row.peak_bytes),
        tables.times_cell(tables.quotient(row.peak_bytes, floor)),
    )


def _measure(*numbers: int) -> dict[str, Any]:
    """The figures of rank 0."""
    with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
        path = Path(folder) / "found.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [sys.executable, *launch, "-m", "mstpass.bench.sharded_rank", str(path)]
        done = subprocess.run(
            [*command, *map(str, numbers)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise UserError(f"a rank failed: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


main = Command("sharded", (run,), _DESCRIPTION, EXAMPLES)
