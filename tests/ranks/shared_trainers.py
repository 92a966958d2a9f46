"""Trainers on ranks that share each sequence, and the same trainers in one process.

Each builder makes a trainer of rows that differ in length, of which some tokens have no labels. The
last batch of an evaluation has one row. Training is by SGD: Adam would magnify rounding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

import mstpass
from mstpass.bench.trainers import ids, text, tokenizer
from tests.ranks.sequences import VOCABULARY, Batch, model_of
from tests.ranks.trainers import common

ROWS, LONGEST = 8, 37  # and five rows to evaluate, two at a time
ENCODER = {
    "local_attention": 8,
    "layer_types": ["sliding_attention"],
    **{f"{where}_dropout": 0.0 for where in ("attention", "embedding", "mlp")},
}
Row = dict[str, list[int]]


def rows() -> list[Row]:
    """Rows of 37, 33, ... tokens. The first fifth of each has no labels."""
    found = []
    for i in range(ROWS):
        tokens = ids(LONGEST - 4 * i, VOCABULARY, i).tolist()
        unlabeled = len(tokens) // 5
        found.append({"input_ids": tokens, "labels": [-100] * unlabeled + tokens[unlabeled:]})
    return found


def padded(batch: list[Row]) -> Batch:
    """Rows of one length, so that there is one graph, filled up on the right."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    each = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in batch]
    return {
        name: torch.tensor([row[name] + [value] * (LONGEST - len(row[name])) for row in each])
        for name, value in fill.items()
    }


def _arguments(**changes: Any) -> dict[str, Any]:
    given = {
        **common(tempfile.gettempdir()),
        "max_steps": -1,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "epoch",
        "optim": "sgd",
        "learning_rate": 0.3,
    }
    return {**given, **changes}


def trainer(collator: Any = padded, model: str = "Llama", **changes: Any) -> Trainer:
    return Trainer(
        model_of(model, num_hidden_layers=1, **(ENCODER if model.startswith("ModernBert") else {})),
        TrainingArguments(**_arguments(**changes)),
        train_dataset=rows(),
        eval_dataset=rows()[:5],
        data_collator=collator,
    )


def each_ranks_mean() -> Trainer:
    """Each data-parallel rank divides by its own number of labels."""
    return trainer(average_tokens_across_devices=False)


def packed() -> Trainer:
    """Rows of a batch one behind the other, told apart by their positions."""
    from transformers import DataCollatorWithFlattening

    return trainer(DataCollatorWithFlattening())


def encoder() -> Trainer:
    """Labels that are not shifted, and padding that attention must not see."""
    return trainer(model="ModernBert MaskedLM")


def sft(**changes: Any) -> Any:
    """TRL's SFT, whose prompts have no labels."""
    import trl
    from datasets import Dataset

    def part(words: int, seed: int) -> str:
        return text(words, VOCABULARY, seed)

    data = {
        "prompt": [part(4 + i, i) for i in range(ROWS)],
        "completion": [" " + part(33 - 4 * i, 10 + i) for i in range(ROWS)],
    }
    return trl.SFTTrainer(
        model_of("Llama", num_hidden_layers=1),
        trl.SFTConfig(
            **_arguments(**changes), bf16=False, gradient_checkpointing=False, max_length=LONGEST
        ),
        train_dataset=Dataset.from_dict(data),
        eval_dataset=Dataset.from_dict({name: column[:5] for name, column in data.items()}),
        processing_class=tokenizer(VOCABULARY),
    )


def sft_packed() -> Any:
    return sft(packing=True, eval_packing=False)


def trained(built: Any) -> dict[str, Any]:
    """What a trainer logs, the steps that it counts and its weights."""
    built.train()
    times = ("time", "per_second", "epoch")
    logged = [
        {name: value for name, value in line.items() if not any(word in name for word in times)}
        for line in built.state.log_history
    ]
    weights = [float(x) for p in built.model.parameters() for x in p.detach().double().flatten()]
    steps = [built.state.global_step, built.state.max_steps, built.state.num_train_epochs]
    return {"logged": logged, "steps": steps, "weights": weights}


def _shared(build: Callable[[], Any], group: Any = True, **how: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    built = build()
    said = mstpass.compile_trainer(built, sequence_parallel=group, **how)
    before = len(mstpass.reports())
    return {**trained(built), "said": said, "graphs": len(mstpass.reports()) - before}


# ---- cases ---------------------------------------------------------------------------------------
def trainer_shared() -> dict[str, Any]:
    return _shared(trainer)


def each_ranks_mean_shared() -> dict[str, Any]:
    return _shared(each_ranks_mean)


def packed_shared() -> dict[str, Any]:
    return _shared(packed)


def encoder_shared() -> dict[str, Any]:
    return _shared(encoder)


def ring_shared() -> dict[str, Any]:
    return _shared(trainer, method="ring")


def sft_shared() -> dict[str, Any]:
    return _shared(sft, head_groups=2)


def sft_packed_shared() -> dict[str, Any]:
    return _shared(sft_packed)


def of_a_mesh() -> dict[str, Any]:
    """Two sequences at a time, each on half of the ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "seq"))
    return _shared(in_order, mesh["seq"])


def ring_of_rows() -> dict[str, Any]:
    """All ranks share each sequence: rows of two exchange heads, and the rows are a ring."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    return _shared(trainer, mesh)


def in_order(**changes: Any) -> Trainer:
    """Rows in their order, so that two ranks of two rows have those of one with four.

    Five rows to evaluate would be filled up to eight, as Accelerate has it, of which four ranks
    compute the mean.
    """
    built = trainer(train_sampling_strategy="sequential", **changes)
    built.eval_dataset = rows()[:4]
    return built


def refusals() -> dict[str, str]:
    found, groups = {}, [dist.new_group(members) for members in ([0, 1], [1])]
    attempts: dict[str, Callable[[], Any]] = {
        "packed in a ring": lambda: _shared(packed, method="ring"),
        "predictions": lambda: _predicted(trainer()),
        "groups": lambda: _shared(trainer, groups[dist.get_rank()]),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    return found


def _predicted(built: Any) -> None:
    mstpass.compile_trainer(built, sequence_parallel=True)
    built.predict(rows()[:2])
