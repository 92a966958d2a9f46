"""`mstpass bench reconstruct`: what crosses to the backward without, with exact and with all rules.

Post-norm transformers of Hugging Face at ``memory_budget=0.0``, where residual sums are saved
between blocks and loops' results besides them. The error of a step is the root mean square of the
relative errors of its gradients against float64; with dropout, whose draws no two runs share,
against the same step with ``reconstruct="off"``.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import mstpass
from mstpass.bench import common
from mstpass.bench.common import Arguments, Progress, Result, Table, Target
from mstpass.bench.huggingface import Case, Size, bert, gemma3, loss_of, olmo2, workload
from mstpass.bench.models import Step
from mstpass.bench.race import Row, own_code, ratios
from mstpass.extras import require
from mstpass.measure import peak_bytes, timed

MODES = ("off", "exact", "tolerant")
BYTES_LIMIT, TIME_LIMIT, ERROR_LIMIT = 0.999, 1.02, 1.1  # against "off"
EXAMPLES = """  mstpass bench reconstruct
  mstpass bench reconstruct --repeats 9 --markdown results.md
"""


QUICK = Size(32, 2, 96, 512, 2, 64)


def main(argv: Sequence[str] = ()) -> int:
    return common.main(
        "reconstruct",
        [run],
        argv,
        description="Saved bytes, peak, gradient error and time of post-norm transformers with "
        "reconstruct off, exact and tolerant.",
        examples=EXAMPLES,
    )


def run(arguments: Arguments) -> Result:
    require(("transformers",), "hf", "mstpass bench reconstruct")
    size = QUICK if arguments.quick else Size()
    tokens = size.batch * size.length
    result = Result(
        "reconstruct",
        f"Post-norm transformers at memory_budget=0.0: d={size.width}, L={size.layers}, "
        f"l={size.mlp_width}, V={size.vocabulary}, N={tokens} (B={size.batch})",
    )
    lines: list[tuple[str, ...]] = []
    with Progress("reconstruct", len(CASES) * (len(MODES) + 1)) as advance:
        for case in CASES:
            lines += _lines(case, size, arguments, result, advance)
    columns = ("model", "reconstruct", "saved MiB", "peak MiB", "gradient error", "time / off")
    result.tables.append(Table("steps", columns, tuple(lines)))
    result.notes.append(
        "Gradient error: root mean square over gradients of the relative error against float64 "
        "(eager's own in brackets); with dropout the difference to off. Time: median ratio over "
        "interleaved rounds (least-greatest)."
    )
    return result


def _lines(
    case: Case,
    size: Size,
    arguments: Arguments,
    result: Result,
    advance: Callable[[str], None],
) -> list[tuple[str, ...]]:
    model, ids = workload(case, size, arguments.device)
    eager = _gradients(_step(case, model, ids))
    reference = None if case.dropout else _gradients(_wide_step(model, ids))
    advance(f"{case}, eager")
    steps: dict[str, Step] = {}
    rows: dict[str, Row] = {}
    saved: dict[str, int] = {}
    errors: dict[str, float] = {}
    with fresh_cache():
        for mode in MODES:
            steps[mode] = _step(case, model, ids, _compiled(mode, arguments.quick))
            gradients = _gradients(steps[mode])
            reference = reference or gradients
            errors[mode] = error(gradients, reference)
            saved[mode] = mstpass.reports()[-1].saved_bytes
            advance(f"{case}, {mode}")
    times = timed(steps, arguments.repeats, device=arguments.device)
    for mode, step in steps.items():
        peak = peak_bytes(step, arguments.device)
        rows[mode] = Row(mode, peak_bytes=peak, seconds=list(times[mode].seconds))
    result.records[str(case)] = {
        mode: {**vars(rows[mode]), "saved_bytes": saved[mode], "gradient_error": errors[mode]}
        for mode in MODES
    }
    _add_targets(case, rows, saved, errors, result)
    own = "" if case.dropout else f" ({error(eager, reference or eager):.1e})"
    return [
        (
            str(case) if mode == MODES[0] else "",
            mode,
            common.mib_cell(saved[mode]),
            common.mib_cell(rows[mode].peak_bytes),
            f"{errors[mode]:.1e}{own}",
            common.ratio_cell(ratios(rows[mode], rows["off"])),
        )
        for mode in MODES
    ]


def _add_targets(
    case: Case,
    rows: dict[str, Row],
    saved: dict[str, int],
    errors: dict[str, float],
    result: Result,
) -> None:
    for mode in MODES[1:]:
        ratio = ratios(rows[mode], rows["off"])
        less = common.quotient(saved[mode], saved[MODES[MODES.index(mode) - 1]])
        # float32 without masks: every saved byte is needed, exactly
        wins = mode != "exact" or case.autocast or case.dropout > 0
        result.targets += [
            Target(
                f"{case}: saved bytes, {mode} / the one before", less, BYTES_LIMIT if wins else 1.0
            ),
            Target(f"{case}: time, {mode} / off", ratio and ratio[0], TIME_LIMIT),
        ]
        if not case.dropout:
            worse = common.quotient(errors[mode], errors["off"])
            result.targets.append(Target(f"{case}: error, {mode} / off", worse, ERROR_LIMIT))


def error(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Root mean square of the relative errors; gradients that are zero but for noise left out."""
    scale = max(_rms(r) for r in reference)
    each = [
        float((g.double() - r.double()).norm() / r.double().norm())
        for g, r in zip(gradients, reference, strict=True)
        if _rms(r) > 1e-9 * scale
    ]
    return math.sqrt(sum(e * e for e in each) / max(1, len(each)))


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().norm()) / math.sqrt(max(1, tensor.numel()))


def _gradients(step: Step) -> list[Tensor]:
    torch.manual_seed(1)  # equal seeds: equal dropout
    return step.with_gradients()[1]


def _compiled(mode: str, quick: bool) -> Callable[[Any], Any]:
    options: dict[str, Any] = {"strict": True, "memory_budget": 0.0, "reconstruct": mode}
    options["chunk_tokens"] = 64 if quick else 256
    return lambda fn: torch.compile(own_code(fn), backend="mst", options=options)


def _step(
    case: Case, model: nn.Module, ids: Tensor, compiled: Callable[[Any], Any] = lambda fn: fn
) -> Step:
    fn = compiled(loss_of(case, model))
    return Step(lambda: fn(ids), [p for p in model.parameters() if p.requires_grad])


def _wide_step(model: nn.Module, ids: Tensor) -> Step:
    wide = copy.deepcopy(model).double()
    leaves = [p for p in wide.parameters() if p.requires_grad]
    return Step(lambda: wide(input_ids=ids, labels=ids).loss, leaves)


CASES = (
    Case("OLMo-2", olmo2, autocast=False),
    Case("OLMo-2", olmo2, autocast=True),
    Case("Gemma-3", gemma3, autocast=True),
    Case("BERT", bert, autocast=False),
    Case("BERT", bert, autocast=False, dropout=0.1),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
