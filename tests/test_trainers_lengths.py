"""Trainers whose batches have many lengths compile one graph, with a plan for each range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mstpass
from mstpass.bench.trainers import ids, llama, text, tokenizer
from mstpass.torch_internals.caches import counters
from tests.ranks.trainers import common

pytest.importorskip("accelerate")

VOCABULARY = 1024
LENGTHS = [40 + 37 * i * i % 700 for i in range(24)]

pytestmark = [
    pytest.mark.op_by_op,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences of these lengths."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": ids(self.lengths[index], VOCABULARY, index).tolist()}


def padded() -> Any:
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer(VOCABULARY), mlm=False)


def flattened() -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()


def by_length() -> dict[str, Any]:
    from transformers import TrainingArguments

    if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__:
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


def trainer(folder: Path, collator: Any, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    return Trainer(
        model=llama(VOCABULARY),
        args=TrainingArguments(**common(folder, **{"max_steps": 6, **changes})),
        train_dataset=Texts(LENGTHS),
        eval_dataset=Texts([100, 300, 50, 200]),
        data_collator=collator,
    )


class Counted:
    """What was compiled since the test began.

    Attributes:
        graphs: by Dynamo; a graph without gradients counts too.
    """

    def __init__(self) -> None:
        self._graphs, self._reports = counters["stats"]["unique_graphs"], len(mstpass.reports())

    @property
    def graphs(self) -> int:
        return int(counters["stats"]["unique_graphs"] - self._graphs)

    @property
    def ends(self) -> list[tuple[int, ...]]:
        """The sizes that each plan is made for; none of a graph with one plan."""
        outcomes = [report.outcome for report in mstpass.reports()[self._reports :]]
        made = [outcome.peaks for outcome in outcomes if not outcome.no_plan]  # not of evaluation
        return [tuple(size for _, size in peaks[0].sizes) if peaks else () for peaks in made]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setenv("MSTPASS_STRICT", "True")
    torch._dynamo.reset()
    return Counted()


def losses(run: Any) -> list[float]:
    run.train()
    names = ("loss", "eval_loss")
    return [line[name] for line in run.state.log_history for name in names if name in line]


EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}


@pytest.mark.parametrize(
    ("collator", "changes", "graphs"),
    [
        (flattened, {}, 1),
        pytest.param(padded, by_length(), 1, marks=pytest.mark.full),
        pytest.param(padded, {**by_length(), **EVALUATION}, 2, marks=pytest.mark.full),
        pytest.param(
            padded,
            {"per_device_train_batch_size": 5},
            1,
            marks=pytest.mark.full,
        ),
    ],
    ids=["flattened", "by length", "evaluation", "a last batch that is shorter"],
)
def test_batches_of_many_lengths(
    collator: Callable[[], Any],
    changes: dict[str, Any],
    graphs: int,
    counted: Counted,
    tmp_path: Path,
) -> None:
    right = losses(trainer(tmp_path, collator(), **changes))
    ours = trainer(tmp_path, collator(), **changes)
    mstpass.compile_trainer(ours, dynamic=True)
    assert losses(ours) == pytest.approx(right, rel=2e-4)
    assert counted.graphs == graphs
    ends = counted.ends
    assert ends and all(ends), "it has ranges"
    assert len(set(ends)) == len(ends) <= 4, "no range is compiled twice"


def test_all_lengths_are_compiled_in_the_first_step(counted: Counted, tmp_path: Path) -> None:
    ours = trainer(tmp_path, flattened(), max_steps=1)
    mstpass.compile_trainer(ours, dynamic=True, lengths="256..2048")
    ours.train()
    assert {(1024,), (2048,)} <= set(counted.ends)


@pytest.mark.full
def test_completions_that_grow(counted: Counted, tmp_path: Path) -> None:
    """TRL's GRPO pads prompts and completions to the longest of each batch."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    prompts = [text(4 + 9 * i, VOCABULARY, i) for i in range(8)]
    run = trl.GRPOTrainer(
        model=llama(VOCABULARY),
        args=trl.GRPOConfig(
            **common(tmp_path, max_steps=6, per_device_train_batch_size=4),
            num_generations=4,
            max_completion_length=64,
            bf16=False,
            gradient_checkpointing=False,
        ),
        reward_funcs=lambda completions, **rest: [float(len(c) % 7) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(VOCABULARY),
    )
    mstpass.compile_trainer(run, dynamic=True)
    run.train()
    assert counted.graphs == 1
    assert len(set(counted.ends)) == len(counted.ends) <= 4
