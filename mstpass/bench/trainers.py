"""Measure training steps of transformers' Trainer and of TRL's GRPO trainer:
peak, time and loss, in eager, under Inductor and under mst.

Each contender is a trainer that trains a model of the same weights with the same batches. The peak
is that of one training step after the first, without the generation of GRPO's completions.

The models, the tokenizer and the texts are made without network.

examples:
  mstpass bench trainers
  mstpass bench trainers --quick
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import mstpass
from mstpass.bench import results
from mstpass.bench.comparison import INDUCTOR, MST, error_text
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.huggingface import Architecture, Scale, architectures
from mstpass.bench.results import Result, Table, Target, plan_text
from mstpass.errors import MissingPackageError, require
from mstpass.measure import Timing, peak_bytes
from mstpass.torch_internals.caches import fresh_cache

FIRST_WORD = 3  # 0 is padding, 1 begins a text, 2 ends it


def tokenizer(vocabulary: int) -> Any:
    """One token for each of the words w3, w4, ..., which stand between spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(FIRST_WORD, vocabulary))]
    of_words = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    of_words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def config(vocabulary: int, width: int = 32, layers: int = 1, **rest: Any) -> Any:
    return _of_llama(vocabulary, width, layers).configuration(num_key_value_heads=2, **rest)


def llama(vocabulary: int, width: int = 32, layers: int = 1) -> Any:
    """A Llama of random weights, the same ones each time."""
    return _of_llama(vocabulary, width, layers).build(num_key_value_heads=2)


def _of_llama(vocabulary: int, width: int, layers: int) -> Architecture:
    return architectures(Scale(vocabulary, width, 2, 2 * width, layers=layers))["llama"]


def text(words: int, vocabulary: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in ids(words, vocabulary, seed).tolist())


def ids(tokens: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, vocabulary, (tokens,), generator=generator)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, as a trainer reads them."""

    def __init__(self, sequences: int, length: int, vocabulary: int):
        self.sequences, self.length, self.vocabulary = sequences, length, vocabulary

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = ids(self.length, self.vocabulary, index)
        return {"input_ids": tokens, "labels": tokens}


# ---- trainers ------------------------------------------------------------------------------------
TRAINER_LIMIT, GRPO_LIMIT, OWN_HEAD_LIMIT = 0.45, 0.40, 0.80
TOLERANCE = 1e-3  # of losses and of gradients' norms, relative to Inductor's
MEASURED_STEP = 2


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
class Row(results.Row):
    """One contender. Losses, norms of the gradient and seconds are by step; the first compiles."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

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


def _measured(title: str, names: Mapping[str, Callable[[str], Any]]) -> list[Row]:
    """A row for each contender: its name, and what makes its trainer in a folder."""
    rows = []
    with advancing(title, len(names)) as advance:
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
            row.plan = plan_text(mstpass.reports()[made:])
            advance(name)
    return rows


def run_trainer(arguments: Arguments) -> Result:
    require(("transformers", "accelerate"), "bench", "mstpass bench trainers")
    size = TRAINER_QUICK if arguments.quick else TRAINER
    build = functools.partial(hf_trainer, size, arguments.device)
    backends = {"eager": None, INDUCTOR: "inductor", MST: "mst"}
    names = {name: functools.partial(build, backend) for name, backend in backends.items()}
    with mock.patch.dict(os.environ, MSTPASS_LOGITS="drop"):
        rows = _measured("Trainer", names)
    result = Result("trainer", f"transformers' Trainer, {size.steps} steps: {size}")
    _fill(result, rows, {INDUCTOR: TRAINER_LIMIT})
    result.notes.append(
        "torch_compile_backend is the only difference between the contenders; MSTPASS_LOGITS=drop."
    )
    return result


def hf_trainer(size: Size, device: torch.device, backend: str | None, folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        **_common(size, folder, device, backend), learning_rate=1e-3, logging_strategy="no"
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
    build = functools.partial(grpo_trainer, size, arguments.device)
    names: dict[str, Callable[[str], Any]] = {
        own: functools.partial(build, None),
        INDUCTOR: functools.partial(build, "inductor"),
        MST: lambda folder: _with_mst(build(None, folder)),
    }
    rows = _measured("GRPO", names)
    _fill(result, rows, {INDUCTOR: GRPO_LIMIT, own: OWN_HEAD_LIMIT})
    result.notes.append(
        "The peak of a step is without the generation of completions. TRL's own head works on "
        "tiles of 4,096 tokens by 32,768 words."
    )
    return result


def _with_mst(trainer: Any) -> Any:
    mstpass.compile_trainer(trainer, strict=True)
    return trainer


def grpo_trainer(size: Size, device: torch.device, backend: str | None, folder: str) -> Any:
    """A GRPO trainer. Nothing is learned, so that all contenders generate the same completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        **_common(size, folder, device, backend),
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


def _common(size: Size, folder: str, device: torch.device, backend: str | None) -> dict[str, Any]:
    compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
    return {
        "output_dir": folder,
        "use_cpu": device.type == "cpu",
        "max_steps": size.steps,
        "per_device_train_batch_size": size.sequences,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        **compiled,
    }


def _fill(result: Result, rows: list[Row], limits: dict[str, float]) -> None:
    """The table of the rows, the targets, and how far losses and gradients differ."""
    by_name = {row.name: row for row in rows}
    base, ours = by_name[INDUCTOR], by_name[MST]
    if not ours.error and not _difference(ours.norms, base.norms) <= TOLERANCE:
        ours.error = f"its gradients differ from {INDUCTOR}'s"
    peaks = {row.name: results.quotient(row.peak_bytes, base.peak_bytes) for row in rows}
    columns: dict[str, Callable[[Row], str]] = {
        "contender": lambda row: row.name,
        "peak MiB": lambda row: row.error or results.mib_cell(row.peak_bytes),
        "peak / Inductor": lambda row: results.times_cell(peaks[row.name]),
        "step s": lambda row: results.seconds_cell(row.median_s),
        "last loss": lambda row: f"{row.losses[-1]:.5f}" if row.losses else "-",
        "its gradient": lambda row: f"{row.norms[-1]:.5f}" if row.norms else "-",
    }
    result.tables.append(Table.of(result.title.split(":")[0], rows, columns))
    for name, limit in limits.items():
        value = results.quotient(ours.peak_bytes, by_name[name].peak_bytes)
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


main = Benchmark("trainers", (run_trainer, run_grpo), __doc__)
