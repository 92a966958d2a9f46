"""Trainers of TRL that compute a loss of their own from outputs: it is compiled with the model."""

import pytest
import torch
from transformers import LlamaForSequenceClassification

import mstpass
from mstpass.bench.trainers import config, llama, text, tokenizer
from tests.ranks.trainers import common
from tests.test_trainers import LENGTH, VOCABULARY, log, pytestmark, same, saved, short_chunks

__all__ = ["pytestmark", "short_chunks"]  # of every test here too


def gkd(folder):
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl.experimental import gkd as library

    rows = [
        [
            {"role": "user", "content": text(9, VOCABULARY, i)},
            {"role": "assistant", "content": text(LENGTH // 2, VOCABULARY, 9 + i)},
        ]
        for i in range(8)
    ]
    words = tokenizer(VOCABULARY)
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return library.GKDTrainer(
        model=llama(VOCABULARY),
        teacher_model=saved(folder),
        args=library.GKDConfig(
            **common(folder, bf16=False, gradient_checkpointing=False), max_length=LENGTH, lmbda=0.0
        ),
        train_dataset=Dataset.from_dict({"messages": rows}),
        processing_class=words,
    )


# torch's cache reads memory that is not its own when it stores GKD's graphs, under Inductor as well
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.full
def test_gkd_has_trls_fused_head_and_does_not_call_it(tmp_path):
    logs, before = [], len(mstpass.reports())
    for compiles in (False, True):
        torch.manual_seed(0)
        trainer = gkd(tmp_path)
        if compiles:
            assert "compute_loss" in mstpass.compile_trainer(trainer)
        with torch.no_grad():
            trainer.teacher_model.lm_head.weight.mul_(3)  # else it is the student
        trainer.train()
        logs.append(log(trainer))
    same(*reversed(logs), tolerance=1e-3)
    assert mstpass.reports()[before:]


@pytest.mark.full
def test_reward_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = {
        name: [text(LENGTH - 1, VOCABULARY, i + first) for i in range(8)]  # and one that ends it
        for name, first in (("chosen", 0), ("rejected", 10))
    }
    logs = []
    for compiles in (False, True):
        torch.manual_seed(0)
        trainer = trl.RewardTrainer(
            model=LlamaForSequenceClassification(config(VOCABULARY, num_labels=1)),
            args=trl.RewardConfig(
                **common(tmp_path, bf16=False, gradient_checkpointing=False), max_length=LENGTH
            ),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(VOCABULARY),
        )
        if compiles:
            assert "the model" in mstpass.compile_trainer(trainer)
        trainer.train()
        logs.append(log(trainer))
    same(*reversed(logs), tolerance=1e-3)
