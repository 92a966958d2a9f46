"""Measure transformers with post-norm blocks under reconstruct=off, exact and
tolerant: saved bytes, peak, gradient error and time.

The models are Hugging Face transformers with post-norm blocks, at small budgets: there the sums of
the residual stream are saved between blocks, and results of loops besides. Gradients are compared
with those of float64. With dropout they are compared with those of ``reconstruct="off"`` at the
first budget, because a float64 step draws other masks.

examples:
  mstpass bench reconstruct
  mstpass bench reconstruct --repeats 9 --markdown docs/results/reconstruct.md
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from mstpass.bench import comparison, results
from mstpass.bench.comparison import Contender, eager, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.huggingface import Case, Scale, loss_of, sized, workload
from mstpass.bench.models import Work
from mstpass.bench.results import Result, Row, Table, Target, mib_cell, quotient, text_of
from mstpass.errors import require

MODES = ("off", "exact", "tolerant")
BUDGETS = (0.1, 0.0)  # at which of them reconstruction helps depends on the model
BYTES_LIMIT, TIME_LIMIT, ERROR_LIMIT = 0.999, 1.02, 1.1  # relative to "off"
_ANY = (math.inf, math.inf)  # errors are shown, not limited
_SEED = 1


QUICK = sized(32, 2, 96, 512, 2, 64)


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench reconstruct")
    size = QUICK if arguments.quick else sized()
    tokens = size.batch * size.length
    result = Result(
        "reconstruct",
        f"Post-norm transformers at small budgets: d={size.width}, L={size.layers}, "
        f"l={size.mlp_width}, V={size.vocabulary}, N={tokens} (B={size.batch})",
    )
    lines: list[tuple[str, ...]] = []
    total = len(CASES) * (1 + len(BUDGETS) * len(MODES)) * (2 + arguments.repeats)
    with advancing("reconstruct", total) as advance:
        for case in CASES:
            rows = _measured(case, size, arguments, advance)
            lines += _lines(case, rows)
            result.targets += _targets(case, rows)
            result.records[str(case)] = results.records(rows)
    columns = ("model", "step", "saved MiB", "peak MiB", "gradient error", "time / off")
    result.tables.append(Table("steps", columns, tuple(lines)))
    result.notes.append(
        "Gradient error: the largest relative error of a gradient against float64, with dropout "
        "against the first row. Time: median ratio over interleaved rounds (least-greatest)."
    )
    return result


def _measured(
    case: Case, size: Scale, arguments: Arguments, advance: Callable[[str], None]
) -> Mapping[str, Row]:
    """Each mode at each budget; before them eager's step, where it draws no masks of its own."""
    model, ids = workload(case, size, arguments.device)
    loss = loss_of(case, model)
    work = Work.of(model, lambda: loss(ids), seed=_SEED, tolerances=_ANY)
    contenders = [_contender(m, b, arguments.quick) for b, m in itertools.product(BUDGETS, MODES)]
    if case.dropout:
        return comparison.compare(contenders, work, arguments, advance)
    wide = copy.deepcopy(model).double()
    exact = Work.of(wide, lambda: wide(input_ids=ids, labels=ids).loss)
    reference = "float64", exact.step(exact.fn).with_gradients()
    return comparison.compare([eager(), *contenders], work, arguments, advance, reference)


def _contender(mode: str, budget: float, quick: bool) -> Contender:
    rows = 64 if quick else 256
    return mst(_name(mode, budget), memory_budget=budget, reconstruct=mode, chunk_tokens=rows)


def _name(mode: str, budget: float | str) -> str:
    return f"{mode}, memory_budget={budget}"


def _lines(case: Case, rows: Mapping[str, Row]) -> Iterator[tuple[str, ...]]:
    for name, row in rows.items():
        off = rows.get(_name("off", name.rpartition("=")[2]), row)
        sizes = mib_cell(row.saved_bytes), mib_cell(row.peak_bytes)
        error = text_of(row.gradient_error, "{:.1e}".format)
        time = row.error or results.ratio_cell(results.ratios(row, off))
        yield (str(case), name, *sizes, error, time)


def _won(case: Case, saved: Mapping[str, int | None]) -> float:
    """Saved bytes of a mode relative to the mode before; the larger of the ratios that count."""
    exact = quotient(saved["exact"], saved["off"]) or 1.0
    tolerant = quotient(saved["tolerant"], saved["exact"]) or 1.0
    return max(exact, tolerant) if case.wins_exactly else tolerant


def _targets(case: Case, rows: Mapping[str, Row]) -> Iterator[Target]:
    won = []
    for budget in BUDGETS:
        found = {mode: rows[_name(mode, budget)] for mode in MODES}
        won.append(_won(case, {mode: row.saved_bytes for mode, row in found.items()}))
        for mode in MODES[1:]:
            name, ratio = f"{case}, {budget}", results.time_ratio(found[mode], found["off"])
            yield Target(f"{name}: time, {mode} / off", ratio, TIME_LIMIT)
            if not case.dropout:
                worse = quotient(found[mode].gradient_error, found["off"].gradient_error)
                yield Target(f"{name}: error, {mode} / off", worse, ERROR_LIMIT)
    what = "each mode / the one before" if case.wins_exactly else "tolerant / exact"
    yield Target(f"{case}: saved bytes, {what}, at its best budget", min(won), BYTES_LIMIT)


CASES = (
    Case("OLMo-2", "olmo2", autocast=False),
    Case("OLMo-2", "olmo2", autocast=True),
    Case("Gemma-3", "gemma3", autocast=True),
    Case("BERT", "bert", autocast=False),
    Case("BERT", "bert", autocast=True, dropout=0.1),
)


main = Benchmark("reconstruct", (run,), __doc__)
