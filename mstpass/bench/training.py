"""Train a small Llama and a post-norm model from real text, with eager from
several seeds and with mst at several budgets, and compare the curves. Each
run of mst is repeated, stopped half-way and resumed: it must give the same
bits.

For each model and precision, each in 300 steps of AdamW over the same batches:

- eager, from several seeds of weights. Their *spread* at a step is the greatest of their losses
  less the least;
- mst at each budget, from the first seed's weights. Its *distance* is that of its loss from
  eager's of the same seed. Losses are means over a window of steps;
- the same again, in two new processes: the first one stops half-way and leaves a checkpoint, the
  second goes on from it. In torch's deterministic mode both must have the same losses and weights
  as the run without a stop, bit for bit.

examples:
  mstpass bench training --plots docs/img --markdown docs/results/training.md
  mstpass bench training --model OLMo-2 --json training.json
  mstpass bench training --quick
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mstpass
from mstpass import stdlib_text
from mstpass.bench import processes, results
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.huggingface import Case, Scale, loss_of, sized
from mstpass.bench.results import Result, Table, Target, mib_cell
from mstpass.errors import require
from mstpass.measure import peak_bytes
from mstpass.torch_internals.settings import recompilation_fails

Budget = str | float
SEEDS = (0, 1, 2)
BUDGETS: tuple[Budget, ...] = ("free", 0.5, 0.0)
_WINDOW = 20  # steps
_TEXT_CHARS = 4 * 2**20
LLAMA, OLMO2 = "Llama", "OLMo-2"
MODELS = {LLAMA: "llama", OLMO2: "olmo2"}  # by their names among the architectures
_LEARNING_RATE, _WARMUP_STEPS = 1e-3, 10


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is trained, and how long."""

    size: Scale
    steps: int
    window: int
    seeds: Sequence[int]
    budgets: Sequence[Budget]
    text_chars: int


FULL = Setup(sized(64, 2, 192, 4096, 8, 256), 300, _WINDOW, SEEDS, BUDGETS, _TEXT_CHARS)
QUICK = Setup(sized(32, 1, 96, 1024, 4, 128), 6, 2, SEEDS[:2], BUDGETS[-1:], 2**17)


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and the steps that a process trains it.

    Attributes:
        budget: ``memory_budget`` of mst; None for eager.
        seed: of the weights.
        first, last: the steps from ``first`` to before ``last``, of ``steps`` in all.
        checkpoint: the file from which a job with ``first`` > 0 goes on, and which a job with
            ``last`` < ``steps`` writes.
    """

    model: str
    autocast: bool
    budget: str | float | None
    seed: int
    size: Scale
    steps: int
    first: int
    last: int
    checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a job found.

    Attributes:
        weights: a hash of all weights after the last step.
        peak_bytes: of a forward and backward after the last step.
        plan: mst's loops, as text.
    """

    losses: list[float]
    weights: str
    peak_bytes: int
    plan: str


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

    def farthest(self, budget: Budget, window: int) -> tuple[float, float, float]:
        """The greatest distance; then spread, and distance / spread, where the latter is most."""
        seeds = [smooth(run.losses, window) for run in self.eager.values()]
        ours = smooth(self.mst[budget].losses, window)
        distances = [abs(a - b) for a, b in zip(ours, seeds[0], strict=True)]
        spreads = [max(losses) - min(losses) for losses in zip(*seeds, strict=True)]
        pairs = zip(distances, spreads, strict=True)
        ratio, spread = max((a / b if b else float("inf") if a else 0.0, b) for a, b in pairs)
        return max(distances), spread, ratio

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
    names = arguments.models(MODELS)
    setup = QUICK if arguments.quick else FULL
    pieces = stdlib_text.read_sources(setup.text_chars)
    tokenizer = stdlib_text.train_tokenizer(pieces, setup.size.vocabulary)
    stream_T = stdlib_text.encode(tokenizer, pieces)
    curves = []
    with advancing("training", 3 * 2 * len(names)) as advance:
        for name in names:
            for autocast in (False, True):
                with tempfile.TemporaryDirectory(prefix="mstpass-") as folder:
                    found = []
                    for number, jobs in enumerate(jobs_of(name, autocast, setup, folder)):
                        found.append(in_process(jobs, stream_T, folder, number, arguments.device))
                        advance(name)
                curves.append(_curves(name, autocast, setup, found))
    if arguments.plots is not None:
        from mstpass.bench.plots import draw_training  # matplotlib is optional

        panels = {str(one): _panel(one, setup.window) for one in curves}
        draw_training(panels, arguments.plots / "training.png")
    return result_of(curves, setup)


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
    """Run the jobs in a new process; one that resumes finds what the one before compiled."""
    stream = Path(folder, "stream.pt")
    torch.save(stream_T, stream)
    jobs_data = [dataclasses.asdict(job) for job in jobs]
    (found,) = processes.call(
        "mstpass bench training: a run",
        run_plain_jobs,
        {"jobs": jobs_data, "stream": str(stream), "device": str(device)},
        environment={
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, f"cache-{min(number, 1)}")),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic products on CUDA need it
        },
    )
    return [Run(**fields) for fields in found]


def run_plain_jobs(jobs: list[dict[str, Any]], stream: str, device: str) -> list[dict[str, Any]]:
    """Run jobs that are given as plain data; this runs in the new process."""
    whole = [Job(**{**job, "size": Scale(**job["size"])}) for job in jobs]
    found = run_jobs(whole, torch.load(stream, weights_only=True), torch.device(device))
    return [dataclasses.asdict(run) for run in found]


def run_jobs(jobs: list[Job], stream_T: Tensor, device: torch.device) -> list[Run]:
    """Each job afresh, in torch's deterministic mode."""
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for job in jobs:
            torch.compiler.reset()
            found.append(train(job, stream_T, device))
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def train(job: Job, stream_T: Tensor, device: torch.device) -> Run:
    """Take the job's steps, and measure one more."""
    case = Case(job.model, MODELS[job.model], job.autocast)
    model = case.build(job.size, job.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS)
    )
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if job.first:
        for name, state in torch.load(job.checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)
    size, made = job.size, len(mstpass.reports())
    batches = stdlib_text.batches(stream_T, job.steps, size.batch, size.length)
    loss_fn = loss_of(case, model)
    if job.budget is not None:
        options: dict[str, Any] = {"memory_budget": job.budget, "strict": True}
        loss_fn = torch.compile(loss_fn, backend="mst", fullgraph=True, options=options)
    losses = []
    for ids_BS in batches[job.first : job.last]:
        loss = loss_fn(ids_BS.to(device))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if job.last < job.steps:
        torch.save({name: part.state_dict() for name, part in parts.items()}, job.checkpoint)
    plan = results.plan_text(mstpass.reports()[made:])
    with recompilation_fails():
        peak = peak_bytes(lambda: loss_fn(batches[-1].to(device)).backward(), device)
    return Run(losses, _hash(model), peak, plan)


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


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
        apart = max(one.farthest(budget, window)[2] for budget in one.mst)
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


def _lines(one: Curves, window: int) -> Iterator[tuple[str, ...]]:
    def cells(name: str, run: Run) -> tuple[str, ...]:
        last = smooth(run.losses, window)[-1]
        return str(one), name, mib_cell(run.peak_bytes), f"{last:.4f}"

    for seed, run in one.eager.items():
        yield (*cells(f"eager, seed {seed}", run), "", "", "", "")
    for budget, run in one.mst.items():
        distance, spread, ratio = one.farthest(budget, window)
        far = f"{distance:.1e}", f"{spread:.1e}", f"{ratio:.4f}"
        bits = "same bits" if one.resumed_alike(budget) else "DIFFERENT"
        yield (*cells(_name(budget), run), *far, bits)


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


main = Benchmark("training", (run,), __doc__, options=("model", "plots"))
