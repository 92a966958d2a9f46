"""transformers' Trainer and TRL's on several ranks, which means DDP."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

from transformers import Trainer, TrainingArguments

import mstpass
from mstpass.bench.trainers import Tokens, llama, text, tokenizer

VOCABULARY, LENGTH = 1024, 128


def _losses(trainer: Any) -> list[float]:
    trainer.train()
    return [line[name] for line in trainer.state.log_history for name in line if "loss" in name]


def _tried(
    new: Callable[..., Any], compile_it: Callable[[Any], object], **named: Any
) -> dict[str, Any]:
    """Losses with mst and without, and the kinds of what runs in chunks."""
    right = _losses(new())
    before = len(mstpass.reports())
    settings = {
        "MSTPASS_CHUNK_TOKENS": "64",
        "MSTPASS_STRICT": "True",
        "MSTPASS_LOGITS": "drop",
    }
    with mock.patch.dict(os.environ, settings):
        trainer = new(**named)
        compile_it(trainer)
        losses = _losses(trainer)
    regions = [r for report in mstpass.reports()[before:] for r in report.regions]
    return {"losses": [losses, right], "kinds": [r.kind for r in regions]}


def common(folder: object, **changes: Any) -> dict[str, Any]:
    """Arguments of a trainer that runs two steps on the CPU and saves nothing."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        **changes,
    }


def _hugging_face(**changes: Any) -> Trainer:
    arguments = TrainingArguments(**common(tempfile.gettempdir(), **changes))
    return Trainer(llama(VOCABULARY), arguments, train_dataset=Tokens(8, LENGTH, VOCABULARY))


def by_name() -> dict[str, Any]:
    named = {"torch_compile": True, "torch_compile_backend": "mst"}
    return _tried(_hugging_face, lambda trainer: None, **named)


def compile_trainer() -> dict[str, Any]:
    return _tried(_hugging_face, mstpass.compile_trainer)


def sft() -> dict[str, Any]:
    import trl
    from datasets import Dataset

    def new() -> Any:
        rows = [text(LENGTH, VOCABULARY, i) for i in range(8)]
        return trl.SFTTrainer(
            llama(VOCABULARY),
            trl.SFTConfig(
                **common(tempfile.gettempdir()),
                bf16=False,
                gradient_checkpointing=False,
                max_length=LENGTH,
            ),
            train_dataset=Dataset.from_dict({"text": rows}),
            processing_class=tokenizer(VOCABULARY),
        )

    return _tried(new, mstpass.compile_trainer)
