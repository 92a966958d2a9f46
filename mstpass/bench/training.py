"""`mstpass bench training`: models trained from real text, with eager and with mst at budgets.

For each model and precision, each in 300 steps of AdamW over the same batches:

- eager, from several seeds of weights. Their *spread* at a step is the greatest of their losses
  less the least;
- mst at each budget, from the first seed's weights. Its *distance* is that of its loss from
  eager's of the same seed. Losses are means over a window of steps;
- the same again, in two new processes: the first one stops half-way and leaves a checkpoint, the
  second goes on from it. In torch's deterministic mode both must have the same losses and weights
  as the run without a stop, bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mstpass import stdlib_text
from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.huggingface_models import Size
from mstpass.bench.tables import Result, Table, Target
from mstpass.bench.training_run import JOBS, MODELS, RUNS, STREAM, Job, Run
from mstpass.errors import UserError, require

Budget = str | float
SEEDS = (0, 1, 2)
BUDGETS: tuple[Budget, ...] = ("free", 0.5, 0.0)
_WINDOW = 20  # steps
_TEXT_CHARS = 4 * 2**20
_ROOT = Path(__file__).parents[2]
_DESCRIPTION = """\
Train a small Llama and a post-norm model from real text, with eager from
several seeds and with mst at several budgets, and compare the curves. Each
run of mst is repeated, stopped half-way and resumed: it must give the same
bits."""
EXAMPLES = """  mstpass bench training --plots docs/img --markdown docs/results/training.md
  mstpass bench training --model OLMo-2 --json training.json
  mstpass bench training --quick
"""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is trained, and how long."""

    size: Size
    steps: int
    window: int
    seeds: Sequence[int]
    budgets: Sequence[Budget]
    text_chars: int


FULL = Setup(Size(64, 2, 192, 4096, 8, 256), 300, _WINDOW, SEEDS, BUDGETS, _TEXT_CHARS)
QUICK = Setup(Size(32, 1, 96, 1024, 4, 128), 6, 2, SEEDS[:2], BUDGETS[-1:], 2**17)


@dataclasses.dataclass(frozen=True)
class Curves:
    """The runs of one model in one precision.

    Attributes:
        eager: by seed.
        mst: by budget, from the first seed's weights.
        halves: by budget, the run that stopped half-way and the one that went on.
    """

    model: str
    autocast: bool
    eager: dict[int, Run]
    mst: dict[Budget, Run]
    halves: dict[Budget, tuple[Run, Run]]

    def __str__(self) -> str:
        return f"{self.model}, {'autocast bf16' if self.autocast else 'fp32'}"

    def spreads(self, window: int) -> list[float]:
        curves = [smooth(run.losses, window) for run in self.eager.values()]
        return [max(losses) - min(losses) for losses in zip(*curves, strict=True)]

    def distances(self, budget: Budget, window: int) -> list[float]:
        eager = smooth(next(iter(self.eager.values())).losses, window)
        ours = smooth(self.mst[budget].losses, window)
        return [abs(a - b) for a, b in zip(ours, eager, strict=True)]

    def resumed_alike(self, budget: Budget) -> bool:
        """Whether stopping, resuming and running again change no bit of losses and weights."""
        whole, (first, second) = self.mst[budget], self.halves[budget]
        return whole.losses == first.losses + second.losses and whole.weights == second.weights


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """The means over each ``window`` losses in a row."""
    means = (sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1))
    return list(means)


def run(arguments: Arguments) -> Result:
    require(("transformers", "tokenizers"), "hf", "mstpass bench training")
    if arguments.plots is not None:
        require(("matplotlib",), "bench", "mstpass bench training --plots")
    names = list(arguments.model) or list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UserError(f"--model {unknown[0]!r} is unknown; choose from: {'; '.join(MODELS)}")
    setup = QUICK if arguments.quick else FULL
    stream_T = _stream(setup)
    curves = []
    with Progress("training", 3 * 2 * len(names)) as advance:
        for name in names:
            for autocast in (False, True):
                with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
                    found = []
                    for number, jobs in enumerate(jobs_of(name, autocast, setup, folder)):
                        found.append(in_process(jobs, stream_T, folder, number, arguments.device))
                        advance(name)
                curves.append(_curves(name, autocast, setup, found))
    if arguments.plots is not None:
        from mstpass.bench.plots import draw_training

        panels = {str(one): _panel(one, setup.window) for one in curves}
        draw_training(panels, arguments.plots / "training.png")
    return result_of(curves, setup)


def _stream(setup: Setup) -> Tensor:
    pieces = stdlib_text.read_sources(setup.text_chars)
    tokenizer = stdlib_text.train_tokenizer(pieces, setup.size.vocabulary)
    return stdlib_text.encode(tokenizer, pieces)


def jobs_of(model: str, autocast: bool, setup: Setup, folder: str) -> Iterator[list[Job]]:
    """The jobs of three processes: whole runs, first halves, second halves."""
    whole = Job(model, autocast, None, setup.seeds[0], setup.size, setup.steps, 0, setup.steps)
    ours = [dataclasses.replace(whole, budget=budget) for budget in setup.budgets]
    yield [*(dataclasses.replace(whole, seed=seed) for seed in setup.seeds), *ours]
    half = setup.steps // 2
    files = [str(Path(folder, f"{budget}.pt")) for budget in setup.budgets]
    pairs = list(zip(ours, files, strict=True))
    yield [dataclasses.replace(job, last=half, checkpoint=file) for job, file in pairs]
    yield [dataclasses.replace(job, first=half, checkpoint=file) for job, file in pairs]


def in_process(
    jobs: Sequence[Job], stream_T: Tensor, folder: str, number: int, device: torch.device
) -> list[Run]:
    """Run the jobs in a new process. The process that resumes finds what the one before compiled.

    Raises:
        UserError: it failed.
    """
    torch.save(stream_T, Path(folder, STREAM))
    given = {"device": str(device), "jobs": [dataclasses.asdict(job) for job in jobs]}
    Path(folder, JOBS).write_text(json.dumps(given), encoding="utf-8")
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = str(Path(folder, f"cache-{min(number, 1)}"))
    done = subprocess.run(
        [sys.executable, "-m", "mstpass.bench.training_run", folder],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic products on CUDA need it
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"mstpass bench training: a run failed:\n{done.stderr[-3000:]}")
    return [Run(**fields) for fields in json.loads(Path(folder, RUNS).read_text("utf-8"))]


def _curves(model: str, autocast: bool, setup: Setup, found: Sequence[list[Run]]) -> Curves:
    whole, firsts, seconds = found
    seeds, budgets = setup.seeds, setup.budgets
    return Curves(
        model,
        autocast,
        dict(zip(seeds, whole, strict=False)),
        dict(zip(budgets, whole[len(seeds) :], strict=True)),
        dict(zip(budgets, zip(firsts, seconds, strict=True), strict=True)),
    )


# ---- tables, targets, picture ------------------------------------------------------------------
def result_of(curves: Sequence[Curves], setup: Setup) -> Result:
    size, window = setup.size, setup.window
    result = Result(
        "training",
        f"{setup.steps} steps of AdamW from real text: d={size.width}, L={size.layers}, "
        f"l={size.mlp_width}, V={size.vocabulary}, N={size.batch * size.length} (B={size.batch})",
    )
    columns = (
        "model", "contender", "peak MiB", "last loss", "distance", "spread", "distance / spread",
        "repeated and resumed",
    )  # fmt: skip
    lines = [line for one in curves for line in _lines(one, window)]
    result.tables.append(Table("training", columns, tuple(lines)))
    for one in curves:
        apart = max(of_spread(one, budget, window) for budget in one.mst)
        different = sum(not one.resumed_alike(budget) for budget in one.mst)
        result.targets += [
            Target(f"{one}: distance / spread", apart, 1.0),
            Target(f"{one}: runs whose bits differ", different, 0.0),
        ]
    result.notes += [
        f"Losses are means over {window} steps. Distance: the greatest difference over all steps "
        "between the losses of mst and of eager from the same weights. Spread: of eager's losses "
        f"from {len(setup.seeds)} seeds of weights, at the step where distance / spread is "
        "greatest.",
        "Repeated and resumed: two new processes trained the same, the first up to a checkpoint "
        "at half of the steps, the second from there; same bits: of all losses and weights.",
        *(
            f"{one}, {_name(b)}: {run.plan or 'no loops'}."
            for one in curves
            for b, run in one.mst.items()
        ),
    ]
    result.records["curves"] = [_record(one) for one in curves]
    return result


def of_spread(one: Curves, budget: Budget, window: int) -> float:
    return _farthest(one, budget, window)[2]


def _farthest(one: Curves, budget: Budget, window: int) -> tuple[float, float, float]:
    """The greatest distance; then spread, and distance / spread, where the latter is greatest."""
    distances, spreads = one.distances(budget, window), one.spreads(window)
    pairs = zip(distances, spreads, strict=True)
    ratios = [(a / b if b else float("inf") if a else 0.0, b) for a, b in pairs]
    ratio, spread = max(ratios)
    return max(distances), spread, ratio


def _lines(one: Curves, window: int) -> Iterator[tuple[str, ...]]:
    for seed, run in one.eager.items():
        peak = tables.mib_cell(run.peak_bytes)
        last = f"{smooth(run.losses, window)[-1]:.4f}"
        yield (str(one), f"eager, seed {seed}", peak, last, "", "", "", "")
    for budget, run in one.mst.items():
        distance, spread, ratio = _farthest(one, budget, window)
        yield (
            str(one),
            _name(budget),
            tables.mib_cell(run.peak_bytes),
            f"{smooth(run.losses, window)[-1]:.4f}",
            f"{distance:.1e}",
            f"{spread:.1e}",
            f"{ratio:.4f}",
            "same bits" if one.resumed_alike(budget) else "DIFFERENT",
        )


def _name(budget: Budget) -> str:
    return f"mst, memory_budget={budget}"


def _panel(one: Curves, window: int) -> dict[str, list[float]]:
    eager = {f"eager, seed {s}": smooth(run.losses, window) for s, run in one.eager.items()}
    return eager | {_name(b): smooth(run.losses, window) for b, run in one.mst.items()}


def _record(one: Curves) -> dict[str, object]:
    return {
        "model": str(one),
        "eager": {str(seed): dataclasses.asdict(run) for seed, run in one.eager.items()},
        "mst": {str(budget): dataclasses.asdict(run) for budget, run in one.mst.items()},
        "same_bits": {str(budget): one.resumed_alike(budget) for budget in one.mst},
    }


main = Command("training", (run,), _DESCRIPTION, EXAMPLES, ("model", "plots"))
