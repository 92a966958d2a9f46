"""Measure transformers with post-norm blocks under reconstruct=off, exact and
tolerant: saved bytes, peak, gradient error and time.

The models are Hugging Face transformers with post-norm blocks, at small budgets: there the sums of
the residual stream are saved between blocks, and results of loops besides. The error of a step is
the root mean square of its gradients' relative errors against float64. With dropout it is taken
against the same step with ``reconstruct="off"``, because a float64 step draws other masks.

examples:
  mstpass bench reconstruct
  mstpass bench reconstruct --repeats 9 --markdown docs/results/reconstruct.md
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mstpass
from mstpass.bench import results
from mstpass.bench.comparison import mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.huggingface import Case, Scale, loss_of, sized, workload
from mstpass.bench.models import Step, Work
from mstpass.bench.results import Result, Row, Table, Target
from mstpass.errors import require
from mstpass.measure import peak_bytes, timed
from mstpass.torch_internals.caches import fresh_cache

MODES = ("off", "exact", "tolerant")
BUDGETS = (0.1, 0.0)  # at which of them reconstruction helps depends on the model
BYTES_LIMIT, TIME_LIMIT, ERROR_LIMIT = 0.999, 1.02, 1.1  # relative to "off"


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
    with advancing("reconstruct", len(CASES) * (len(BUDGETS) * len(MODES) + 1)) as advance:
        for case in CASES:
            lines += _lines(case, size, arguments, result, advance)
    columns = ("model", "budget", "reconstruct", "saved MiB", "peak MiB", "gradient error")
    result.tables.append(Table("steps", (*columns, "time / off"), tuple(lines)))
    result.notes.append(
        "Gradient error: root mean square over gradients of the relative error against float64 "
        "(eager's own in brackets); with dropout the difference to off. Time: median ratio over "
        'interleaved rounds (least-greatest); "as off": the plans are equal, so the program is one.'
    )
    return result


@dataclasses.dataclass(frozen=True)
class _Measured:
    """The figures of a step in one mode.

    Attributes:
        same_as: an earlier mode with an equal plan; empty if there is none.
    """

    row: Row
    saved_bytes: int
    gradient_error: float
    same_as: str


def _lines(
    case: Case,
    size: Scale,
    arguments: Arguments,
    result: Result,
    advance: Callable[[str], None],
) -> list[tuple[str, ...]]:
    model, ids = workload(case, size, arguments.device)
    eager = _gradients(_step(case, model, ids))
    wide = None if case.dropout else _gradients(_wide_step(model, ids))
    own = f" ({error(eager, wide):.1e})" if wide is not None else ""
    advance(f"{case}, eager")
    lines: list[tuple[str, ...]] = []
    won: list[float] = []
    for budget in BUDGETS:
        steps = {
            mode: _step(case, model, ids, _compiled(mode, budget, arguments.quick))
            for mode in MODES
        }
        found = _measured(steps, wide, arguments, lambda mode: advance(f"{case}, {mode}"))
        result.records[f"{case}, {budget}"] = {
            mode: {**vars(one.row), "saved_bytes": one.saved_bytes, "error": one.gradient_error}
            for mode, one in found.items()
        }
        result.targets += _targets(f"{case}, {budget}", case, found)
        won.append(_won(case, {mode: one.saved_bytes for mode, one in found.items()}))
        firsts = [(str(case) if budget == BUDGETS[0] else "", str(budget)), *[("", "")] * 2]
        for names, (mode, one) in zip(firsts, found.items(), strict=True):
            figures = results.mib_cell(one.saved_bytes), results.mib_cell(one.row.peak_bytes)
            time = results.ratio_cell(results.ratios(one.row, found["off"].row))
            time = f"as {one.same_as}" if one.same_as else time
            lines.append((*names, mode, *figures, f"{one.gradient_error:.1e}{own}", time))
    what = "each mode / the one before" if case.wins_exactly else "tolerant / exact"
    name = f"{case}: saved bytes, {what}, at its best budget"
    result.targets.append(Target(name, min(won), BYTES_LIMIT))
    return lines


def _measured(
    steps: dict[str, Step],
    reference: Sequence[Tensor] | None,
    arguments: Arguments,
    advance: Callable[[str], None],
) -> dict[str, _Measured]:
    reports: dict[str, mstpass.Report] = {}
    errors: dict[str, float] = {}
    with fresh_cache():
        for mode, step in steps.items():
            gradients = _gradients(step)
            reference = reference or gradients
            errors[mode] = error(gradients, reference)
            reports[mode] = mstpass.reports()[-1]
            advance(mode)
    # Steps with equal plans are the same program: only noise would make their times differ.
    first = {m: next(o for o in steps if _plan(reports[o]) == _plan(reports[m])) for m in steps}
    device, different = (
        arguments.device,
        {mode: steps[mode] for mode in dict.fromkeys(first.values())},
    )
    rows = {
        mode: Row(mode, peak_bytes=peak_bytes(steps[mode], device), seconds=list(timing.seconds))
        for mode, timing in timed(different, arguments.repeats, device=device).items()
    }
    return {
        mode: _Measured(
            rows[first[mode]],
            reports[mode].saved_bytes,
            errors[mode],
            first[mode] if first[mode] != mode else "",
        )
        for mode in steps
    }


def _plan(report: mstpass.Report) -> object:
    """The parts of a report that determine the two compiled graphs."""
    return report.regions, report.outcome.save_plan


def _won(case: Case, saved: dict[str, int]) -> float:
    """Saved bytes of a mode relative to the mode before; the larger of the ratios that count."""
    exact = results.quotient(saved["exact"], saved["off"]) or 1.0
    tolerant = results.quotient(saved["tolerant"], saved["exact"]) or 1.0
    return max(exact, tolerant) if case.wins_exactly else tolerant


def _targets(name: str, case: Case, found: dict[str, _Measured]) -> list[Target]:
    targets = []
    for mode in MODES[1:]:
        if not found[mode].same_as:
            ratio = results.time_ratio(found[mode].row, found["off"].row)
            targets.append(Target(f"{name}: time, {mode} / off", ratio, TIME_LIMIT))
        if not case.dropout:
            worse = results.quotient(found[mode].gradient_error, found["off"].gradient_error)
            targets.append(Target(f"{name}: error, {mode} / off", worse, ERROR_LIMIT))
    return targets


def error(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Root mean square of the gradients' relative errors.

    Gradients that are zero but for rounding, such as that of a key's bias, are left out.
    """
    scale = max(_rms(r) for r in reference)
    each = [
        float((g.double() - r.double()).norm() / r.double().norm())
        for g, r in zip(gradients, reference, strict=True)
        if _rms(r) > 1e-6 * scale
    ]
    return math.sqrt(sum(e * e for e in each) / max(1, len(each)))


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().norm()) / math.sqrt(max(1, tensor.numel()))


def _gradients(step: Step) -> list[Tensor]:
    torch.manual_seed(1)  # equal seeds draw equal dropout masks
    return step.with_gradients()[1]


def _compiled(mode: str, budget: float, quick: bool) -> Callable[[Any], Any]:
    return mst(memory_budget=budget, reconstruct=mode, chunk_tokens=64 if quick else 256).build


def _step(
    case: Case, model: nn.Module, ids: Tensor, compiled: Callable[[Any], Any] = lambda fn: fn
) -> Step:
    fn = compiled(loss_of(case, model))
    work = Work.of(model, lambda: fn(ids))
    return work.step(work.fn)


def _wide_step(model: nn.Module, ids: Tensor) -> Step:
    wide = copy.deepcopy(model).double()
    work = Work.of(wide, lambda: wide(input_ids=ids, labels=ids).loss)
    return work.step(work.fn)


CASES = (
    Case("OLMo-2", "olmo2", autocast=False),
    Case("OLMo-2", "olmo2", autocast=True),
    Case("Gemma-3", "gemma3", autocast=True),
    Case("BERT", "bert", autocast=False),
    Case("BERT", "bert", autocast=True, dropout=0.1),
)


main = Benchmark("reconstruct", (run,), __doc__)
