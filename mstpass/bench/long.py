"""Measure the peak and the time of a Llama-like step with a long sequence under
memory budgets, with loops over tokens alone and with loops over heads; with
--grouped, of a model with grouped queries, and with loops through attention.

At this length attention has the peak of the step. The least memory is measured with loops over
tokens alone (``chunk="tokens"``), and with loops over heads as well; then budgets just above it,
which cost less time.
With ``--grouped``, fewer heads have keys than queries, and loops over tokens through attention
(blocks) are compared with those over heads.

examples:
  mstpass bench long --repeats 3
  mstpass bench long --grouped --repeats 1
  mstpass bench long --quick
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mstpass.bench import comparison, results
from mstpass.bench.comparison import INDUCTOR, Contender, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark
from mstpass.bench.models import LlamaSize, Work, llama
from mstpass.bench.results import Result, Row, Target

SIZE = LlamaSize(width=512, layers=4, heads=8, mlp_width=2048, vocabulary=32_000, length=16_384)
QUICK = LlamaSize(width=64, layers=2, heads=4, mlp_width=128, vocabulary=512, length=1024)
SHARED = 4  # with --grouped: so many heads of queries read the keys of one
NEAR_LEAST = (0.04, 0.06)  # shares of the memory between least and free that save most of the time
PEAK_LIMIT, TIME_LIMIT, DEVIATION_LIMIT = 0.65, 1.05, 0.03
BLOCKS_PEAK_LIMIT, BLOCKS_TIME_LIMIT = 0.75, 1.10  # of loops over heads; over tokens alone


def run(arguments: Arguments) -> Result:
    size = QUICK if arguments.quick else SIZE
    if arguments.grouped:
        return _grouped(dataclasses.replace(size, key_value_heads=size.heads // SHARED), arguments)
    budgets = [mst(_name(budget), memory_budget=budget) for budget in (0.0, *NEAR_LEAST)]
    result, rows = _measured(size, budgets, arguments)
    result.targets += _targets(rows)
    result.notes.append(
        f"{results.ROUNDS} The targets compare the steps at memory_budget=0.0 with and without "
        "loops over heads."
    )
    return result


def _measured(
    size: LlamaSize, contenders: list[Contender], arguments: Arguments
) -> tuple[Result, Mapping[str, Row]]:
    """Inductor, the least memory of loops over tokens alone, and the contenders."""
    model, ids, labels = llama(size, arguments.device)
    least = mst(_name(0.0, "tokens"), memory_budget=0.0, chunk="tokens")
    work = Work.of(model, lambda: model(ids, labels))
    rows = comparison.measured("long", [inductor(), least, *contenders], work, arguments)
    name = "long-grouped" if size.key_value_heads else "long"
    result = Result(name, f"A long sequence: {size}")
    result.tables.append(results.steps_table("steps", rows.values(), rows[INDUCTOR]))
    result.records["rows"] = results.records(rows)
    return result, rows


def _grouped(size: LlamaSize, arguments: Arguments) -> Result:
    """Where queries share keys: loops over heads, and those through attention."""
    heads = _name(0.0, "heads")
    contenders = [mst(heads, memory_budget=0.0, chunk="heads"), mst(_name(0.0), memory_budget=0.0)]
    result, rows = _measured(size, contenders, arguments)
    blocks, tokens = rows[_name(0.0)], rows[_name(0.0, "tokens")]
    peak, time = results.peak_ratio(blocks, rows[heads]), results.time_ratio(blocks, tokens)
    result.targets += [
        Target("peak / of loops over heads", peak, BLOCKS_PEAK_LIMIT),
        Target("time / of loops over tokens alone", time, BLOCKS_TIME_LIMIT),
    ]
    result.notes.append(f"{results.ROUNDS} Each plan is that of memory_budget=0.0.")
    return result


def _name(budget: float, chunk: str = "auto") -> str:
    return f"mst, memory_budget={budget:g}" + ("" if chunk == "auto" else f', chunk="{chunk}"')


def _targets(rows: Mapping[str, Row]) -> list[Target]:
    ours, base = rows[_name(0.0)], rows[_name(0.0, "tokens")]
    simulated = results.quotient(ours.peak_bytes, ours.simulated_bytes)
    deviation = simulated and abs(simulated - 1)
    what = "{} / without loops over heads"
    return [
        *results.peak_and_time_targets(what, ours, base, PEAK_LIMIT, TIME_LIMIT),
        Target("|measured / simulated - 1|", deviation, DEVIATION_LIMIT),
    ]


main = Benchmark("long", (run,), __doc__, options=("grouped",))
