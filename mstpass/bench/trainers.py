"""`mstpass bench trainers`: steps of transformers' Trainer and of TRL's GRPO, with real trainers.

Each contender is a trainer that trains a model of the same weights with the same batches. The peak
is that of one training step after the first, without the generation of GRPO's completions.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import mstpass
from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import INDUCTOR, MST, error_text
from mstpass.bench.tables import Result, Table, Target
from mstpass.bench.trainer_models import Tokens, llama, text, tokenizer
from mstpass.errors import MissingPackageError, require
from mstpass.measure import Timing, peak_bytes
from mstpass.torch_internals.caches import fresh_cache

TRAINER_LIMIT, GRPO_LIMIT, OWN_HEAD_LIMIT = 0.45, 0.40, 0.80
TOLERANCE = 1e-3  # of losses and of gradients' norms, relative to Inductor's
MEASURED_STEP = 2
_DESCRIPTION = """\
Measure training steps of transformers' Trainer and of TRL's GRPO trainer:
peak, time and loss, in eager, under Inductor and under mst."""
EXAMPLES = """  mstpass bench trainers
  mstpass bench trainers --quick
"""


@dataclass(frozen=True)
class Size:
    vocabulary: int
    width: int
    layers: int
    sequences: int
    length: int
    steps: int

    def __str__(self) -> str:
        return (
            f"d={self.width}, {self.layers} layers, V={self.vocabulary}, {self.sequences} "
            f"sequences of {self.length} tokens"
        )


TRAINER, TRAINER_QUICK = Size(8000, 128, 2, 4, 256, 100), Size(2048, 32, 1, 2, 128, 4)
GRPO, GRPO_QUICK = Size(32_000, 128, 2, 8, 128, 4), Size(2048, 32, 1, 4, 64, 3)


@dataclass
class Row:
    """One contender. Losses, norms of the gradient and seconds are by step; the first compiles."""

    name: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    plan: str = ""
    error: str = ""

    @property
    def median_s(self) -> float | None:
        timed = [s for i, s in enumerate(self.seconds) if i not in (0, MEASURED_STEP)]
        return Timing(tuple(timed)).median_s if timed and not self.error else None


def train(row: Row, trainer: Any) -> None:
    """Train with a trainer, and write the figures of each step to the row."""
    own = trainer.training_step

    def step(model: Any, inputs: Any, *rest: Any) -> Any:
        prepared, values = trainer._prepare_inputs(inputs), []  # GRPO generates here
        trainer._prepare_inputs = lambda same: same
        run = lambda: values.append(own(model, prepared, *rest))
        start = time.perf_counter()
        try:
            if len(row.losses) == MEASURED_STEP:
                row.peak_bytes = peak_bytes(run, trainer.args.device)
            else:
                run()
        finally:
            del trainer._prepare_inputs
        row.seconds.append(time.perf_counter() - start)
        row.losses.append(values[0].item())
        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        row.norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return values[0]

    trainer.training_step = step
    trainer.train()


def _measured(names: dict[str, Callable[[str], Any]], advance: Callable[[str], None]) -> list[Row]:
    rows = []
    for name, build in names.items():
        row = Row(name)
        rows.append(row)
        torch.compiler.reset()
        made = len(mstpass.reports())
        with fresh_cache(), tempfile.TemporaryDirectory() as folder:
            try:
                train(row, build(folder))
            except Exception as error:
                row.error = error_text(error)
        regions = [region for report in mstpass.reports()[made:] for region in report.regions]
        row.plan = ", ".join(f"{r.kind} {r.mode} in {r.num_chunks}" for r in regions)
        advance(name)
    return rows


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_trainer(arguments: Arguments) -> Result:
    require(("transformers", "accelerate"), "bench", "mstpass bench trainers")
    size = TRAINER_QUICK if arguments.quick else TRAINER
    names = {
        "eager": lambda folder: hf_trainer(size, folder, arguments.device),
        INDUCTOR: lambda folder: hf_trainer(size, folder, arguments.device, "inductor"),
        MST: lambda folder: hf_trainer(size, folder, arguments.device, "mst"),
    }
    with Progress("Trainer", len(names)) as advance, _environment(MSTPASS_LOGITS="drop"):
        rows = _measured(names, advance)
    result = Result("trainer", f"transformers' Trainer, {size.steps} steps: {size}")
    _fill(result, rows, {INDUCTOR: TRAINER_LIMIT})
    result.notes.append(
        "torch_compile_backend is the only difference between the contenders; MSTPASS_LOGITS=drop."
    )
    return result


def hf_trainer(size: Size, folder: str, device: torch.device, backend: str | None = None) -> Any:
    from transformers import Trainer, TrainingArguments

    compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
    arguments = TrainingArguments(
        **_common(size, folder, device), **compiled, learning_rate=1e-3, logging_strategy="no"
    )
    data = Tokens(size.steps * size.sequences, size.length, size.vocabulary)
    model = llama(size.vocabulary, size.width, size.layers)
    return Trainer(model=model, args=arguments, train_dataset=data)


def run_grpo(arguments: Arguments) -> Result:
    size = GRPO_QUICK if arguments.quick else GRPO
    result = Result("grpo", f"TRL's GRPO: {size} of completion")
    try:
        require(("trl", "datasets"), "bench", "the rows of TRL's GRPO")
    except MissingPackageError as error:
        result.notes.append(f"Not measured. {error}")
        return result
    own = "TRL's own head, eager"
    names = {
        own: lambda folder: grpo_trainer(size, folder, arguments.device),
        INDUCTOR: lambda folder: grpo_trainer(size, folder, arguments.device, "inductor"),
        MST: lambda folder: _with_mst(grpo_trainer(size, folder, arguments.device)),
    }
    with Progress("GRPO", len(names)) as advance:
        rows = _measured(names, advance)
    _fill(result, rows, {INDUCTOR: GRPO_LIMIT, own: OWN_HEAD_LIMIT})
    result.notes.append(
        "The peak of a step is without the generation of completions. TRL's own head works on "
        "tiles of 4,096 tokens by 32,768 words."
    )
    return result


def _with_mst(trainer: Any) -> Any:
    mstpass.compile_trainer(trainer, strict=True)
    return trainer


def grpo_trainer(size: Size, folder: str, device: torch.device, backend: str | None = None) -> Any:
    """A GRPO trainer. Nothing is learned, so that all contenders generate the same completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
    arguments = GRPOConfig(
        **_common(size, folder, device),
        **compiled,
        learning_rate=0.0,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=size.sequences,
        max_completion_length=size.length,
        generation_kwargs={"min_new_tokens": size.length},
        temperature=0.9,
    )
    prompts = [text(16, size.vocabulary, i) for i in range(size.steps * size.sequences)]
    return GRPOTrainer(
        model=llama(size.vocabulary, size.width, size.layers),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(size.vocabulary),
        reward_funcs=_number_of_words,
    )


def _number_of_words(completions: list[str], **rest: Any) -> list[float]:
    return [float(len(set(completion.split())) % 7) for completion in completions]


def _common(size: Size, folder: str, device: torch.device) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": device.type == "cpu",
        "max_steps": size.steps,
        "per_device_train_batch_size": size.sequences,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def _fill(result: Result, rows: list[Row], limits: dict[str, float]) -> None:
    """The table of the rows, the targets, and how far losses and gradients differ."""
    by_name = {row.name: row for row in rows}
    base, ours = by_name[INDUCTOR], by_name[MST]
    if not ours.error and not _difference(ours.norms, base.norms) <= TOLERANCE:
        ours.error = f"its gradients differ from {INDUCTOR}'s"
    lines = [
        (
            row.name,
            row.error or tables.mib_cell(row.peak_bytes),
            tables.times_cell(tables.quotient(row.peak_bytes, base.peak_bytes)),
            tables.seconds_cell(row.median_s),
            f"{row.losses[-1]:.5f}" if row.losses else "-",
            f"{row.norms[-1]:.5f}" if row.norms else "-",
        )
        for row in rows
    ]
    columns = ("contender", "peak MiB", "peak / Inductor", "step s", "last loss", "its gradient")
    result.tables.append(Table(result.title.split(":")[0], columns, tuple(lines)))
    for name, limit in limits.items():
        value = tables.quotient(ours.peak_bytes, by_name[name].peak_bytes)
        result.targets.append(Target(f"peak / {name}", None if ours.error else value, limit))
    losses, norms = _difference(ours.losses, base.losses), _difference(ours.norms, base.norms)
    result.notes.append(
        f"Over {len(ours.losses)} steps, losses differ from Inductor's by at most {losses:.0e}, "
        f"norms of gradients by {norms:.0e} of theirs."
    )
    result.notes.append(f"mst: {ours.plan or 'nothing chunked'}.")
    result.records["rows"] = [vars(row) for row in rows]


def _difference(ours: list[float], base: list[float]) -> float:
    """The largest difference of two figures, relative to the second one's largest."""
    scale = max(map(abs, base), default=0.0)
    pairs = zip(ours, base, strict=False)
    return max((abs(a - b) / max(scale, 1e-6) for a, b in pairs), default=math.nan)


main = Command("trainers", (run_trainer, run_grpo), _DESCRIPTION, EXAMPLES)
