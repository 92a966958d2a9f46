"""transformers' Trainer and TRL's: losses and metrics are eager's, the head runs in chunks."""

import importlib.util
import os

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import mstpass
from mstpass import TrainerError
from mstpass.bench.trainers import Tokens, llama, text, tokenizer
from mstpass.trainers import exchange
from tests.ranks.launch import run_ranks
from tests.ranks.trainers import common

pytest.importorskip("accelerate")

VOCABULARY, LENGTH, CHUNK = 1024, 128, 64

pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.op_by_op,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


_before = 0  # reports of other tests


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Heads of so few tokens would stay whole; Accelerate can pass on no options."""
    global _before
    _before = len(mstpass.reports())
    monkeypatch.setenv("MSTPASS_CHUNK_TOKENS", str(CHUNK))
    monkeypatch.setenv("MSTPASS_STRICT", "True")


def log(trainer, prefix=""):
    """All that a trainer has logged but times, by step."""
    skipped = ("time", "runtime", "per_second", "total_flos")
    return [
        {k: v for k, v in line.items() if not any(word in k for word in skipped)}
        for line in trainer.state.log_history
        if "loss" in line or "eval_loss" in line
    ]


def same(ours, theirs, tolerance=2e-4):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def heads():
    """The heads of the graphs that this test has compiled."""
    regions = [region for report in mstpass.reports()[_before:] for region in report.regions]
    return [region for region in regions if region.kind == "lm_head"]


def hf(folder, kind=None, **changes):
    from transformers import Trainer, TrainingArguments

    extra = {k: changes.pop(k) for k in ("compute_loss_func", "compute_metrics") if k in changes}
    arguments = TrainingArguments(**common(folder, **changes))
    data = Tokens(8, LENGTH, VOCABULARY)
    model = llama(VOCABULARY)
    return (kind or Trainer)(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, **extra
    )


def test_trainer(tmp_path, monkeypatch):
    """By the backend's name; gradients accumulate, and evaluation reads all logits."""

    def accuracy(predictions):
        return {"accuracy": float((predictions.predictions.argmax(-1) == 5).mean())}

    changes = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    changes |= {"per_device_eval_batch_size": 4, "compute_metrics": accuracy}
    right = hf(tmp_path, **changes)
    right.train()
    monkeypatch.setenv("MSTPASS_LOGITS", "drop")
    ours = hf(tmp_path, torch_compile=True, torch_compile_backend="mst", **changes)
    ours.train()
    same(log(ours), log(right))
    assert "eval_accuracy" in log(ours)[-1]
    assert [head.mode for head in heads()] == ["fused"]


def weighted(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return 0.5 * loss


@pytest.mark.parametrize(
    "changes",
    [
        {"label_smoothing_factor": 0.1},
        pytest.param({"compute_loss_func": weighted}, marks=pytest.mark.full),
    ],
)
def test_a_loss_outside_of_the_model(changes, tmp_path):
    right = hf(tmp_path, **changes)
    right.train()
    ours = hf(tmp_path, **changes)
    assert "compute_loss" in mstpass.compile_trainer(ours)
    ours.train()
    same(log(ours), log(right))
    if torch.__version__ >= "2.12" or "compute_loss_func" in changes:
        assert len(heads()) == 1  # 2.11 breaks the graph before the smoothed loss: docs/versions.md


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"bf16": True}, {"activation_checkpointing": True}])
def test_compile_trainer_compiles_the_model(changes, tmp_path):
    right = hf(tmp_path, **changes)
    right.train()
    ours = hf(tmp_path, **changes)
    assert "the model" in mstpass.compile_trainer(ours)
    ours.train()
    same(log(ours), log(right), tolerance=2e-2 if "bf16" in changes else 2e-4)
    assert len(heads()) == 1
    ours.save_model(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


class Ragged(Tokens):
    """Sequences of many lengths, for collators that pad or pack them."""

    def __getitem__(self, index):
        return {
            "input_ids": super().__getitem__(index)["input_ids"][: LENGTH - 13 * index].tolist()
        }


def padding():
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer(VOCABULARY), mlm=False)


def packing():
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening()


@pytest.mark.parametrize("collator", [padding, packing])
def test_collators_that_pad_and_pack(collator, tmp_path):
    """Losses of both steps are eager's, so the gradients of the first are; masks are from data."""
    from transformers import Trainer, TrainingArguments

    def trainer():
        torch.manual_seed(0)
        return Trainer(
            model=llama(VOCABULARY),
            args=TrainingArguments(**common(tmp_path)),
            train_dataset=Ragged(8, LENGTH, VOCABULARY),
            data_collator=collator(),
        )

    right = trainer()
    right.train()
    ours = trainer()
    assert "the model" in mstpass.compile_trainer(ours)
    ours.train()
    same(log(ours), log(right))
    assert {head.mode for head in heads()} == {"fused"}


def test_two_compilers_are_refused(tmp_path):
    trainer = hf(tmp_path, torch_compile=True, torch_compile_backend="inductor")
    with pytest.raises(TrainerError, match=r"torch_compile_backend='inductor'.*compile_trainer"):
        mstpass.compile_trainer(trainer)
    trainer = hf(tmp_path)
    trainer.args.use_liger_kernel = True
    with pytest.raises(TrainerError, match=r"use_liger_kernel=True.*Leave use_liger_kernel out"):
        mstpass.compile_trainer(trainer)
    with pytest.raises(mstpass.OptionError, match="memory_budgte"):
        mstpass.compile_trainer(hf(tmp_path), memory_budgte=0.0)


@pytest.mark.full
def test_two_ranks():
    """Under DDP: by the backend's name, and with compile_trainer."""
    trl = ["sft"] if importlib.util.find_spec("trl") else []
    for case, results in run_ranks("trainers", ["by_name", "compile_trainer", *trl]).items():
        for result in results:
            ours, right = result["losses"]
            assert len(right) >= 2 and ours == pytest.approx(right, rel=2e-4), case
            assert result["kinds"].count("lm_head") == 1, case


# ---- TRL -----------------------------------------------------------------------------------------
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize(
    "scales", [(1.0, None, 1.0), (0.7, 30.0, 0.5)], ids=["plain", "temperature, cap, scale"]
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_plain_function_is_trls(scales, bias):
    pytest.importorskip("trl")
    from trl.kernels import ChunkedLogProbFunction

    from mstpass.trainers.trl_head import token_statistics

    temperature, cap, scale = scales
    hidden = torch.randn(24, 16, requires_grad=True)
    weight = torch.randn(90, 16, requires_grad=True)
    leaves = [hidden, weight, *([torch.randn(90, requires_grad=True)] if bias else [])]
    rest = (leaves[2] if bias else None, torch.randint(90, (24,)), temperature, 32, cap, scale)
    each = []
    for function in (ChunkedLogProbFunction.apply, token_statistics):
        values = function(hidden, weight, *rest, OUTPUTS)
        loss = (values[0] * values[0].detach().cos()).sum() + values[1].square().sum()
        each.append([*values, *torch.autograd.grad(loss, leaves)])
    for theirs, ours in zip(*each, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert token_statistics(hidden, weight, *rest)[1:] == (None,) * 4


def test_another_trl_is_refused():
    trl_head = pytest.importorskip("mstpass.trainers.trl_head")

    def _fused_forward(self, *args, **kwargs):
        return None

    model = llama(VOCABULARY)
    model.forward = _fused_forward.__get__(model)
    assert trl_head.has_fused_head(model) and not trl_head.has_fused_head(llama(VOCABULARY))
    with pytest.raises(TrainerError, match=r"knows TRL 1\.16.*Install trl==1\.16\.\*"):
        trl_head.compile_fused_head(model, torch.compile, entropy_has_gradient=False)


def test_a_function_with_other_globals():
    changed = exchange.with_globals(heads, {"mstpass": None})
    assert changed.__globals__["mstpass"] is None and heads.__globals__["mstpass"] is mstpass
    with pytest.raises(KeyError):
        exchange.with_globals(heads, {"os": os})


def saved(folder):
    """A model that TRL can load a second time, as its reference."""
    llama(VOCABULARY).save_pretrained(folder / "model")
    return LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def grpo(folder, kind="GRPO", **changes):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    arguments = getattr(trl, f"{kind}Config")(
        **common(folder, learning_rate=0.0, per_device_train_batch_size=4),
        num_generations=4,
        max_completion_length=LENGTH,
        temperature=0.9,
        **{"bf16": False, "gradient_checkpointing": False, **changes},
    )
    return getattr(trl, f"{kind}Trainer")(
        model=saved(folder),
        args=arguments,
        reward_funcs=lambda completions, **rest: [float(len(c) % 7) for c in completions],
        train_dataset=Dataset.from_dict({"prompt": [text(8, VOCABULARY, i) for i in range(8)]}),
        processing_class=tokenizer(VOCABULARY),
    )


def rloo(folder):
    return grpo(folder, "RLOO")


def grpo_with_reference(folder):
    return grpo(folder, beta=0.1, entropy_coef=0.01)


def sft(folder, peft_config=None, words=lambda i: LENGTH, **changes):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    arguments = trl.SFTConfig(
        **common(folder, bf16=False, gradient_checkpointing=False, **changes), max_length=LENGTH
    )
    rows = [text(words(i), VOCABULARY, i) for i in range(8)]
    return trl.SFTTrainer(
        model=llama(VOCABULARY),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": rows}),
        eval_dataset=Dataset.from_dict({"text": rows}),
        processing_class=tokenizer(VOCABULARY),
        peft_config=peft_config,
    )


def sft_with_lora(folder):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
    return sft(folder, peft_config=adapters)


def sft_packed(folder):
    """Several texts in a sequence, told apart by their positions."""
    return sft(folder, words=lambda i: LENGTH // 4 + 5 * i, packing=True)


def preferences(folder, kind, columns):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    arguments = getattr(trl, f"{kind}Config")(
        **common(folder, bf16=False, gradient_checkpointing=False), max_length=LENGTH
    )
    return getattr(trl, f"{kind}Trainer")(
        model=saved(folder),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(VOCABULARY),
    )


def dpo(folder):
    prompt, chosen, rejected = (
        [text(LENGTH // 2, VOCABULARY, i + first) for i in range(8)] for first in (0, 10, 20)
    )
    return preferences(folder, "DPO", {"prompt": prompt, "chosen": chosen, "rejected": rejected})


def kto(folder):
    prompt, completion = (
        [text(LENGTH // 2, VOCABULARY, i + first) for i in range(8)] for first in (0, 10)
    )
    labels = [i % 2 == 0 for i in range(8)]
    return preferences(folder, "KTO", {"prompt": prompt, "completion": completion, "label": labels})


@pytest.mark.parametrize(
    "build",
    [
        grpo,
        sft,
        sft_packed,
        *(
            pytest.param(build, marks=pytest.mark.full)
            for build in (sft_with_lora, grpo_with_reference, rloo, dpo, kto)
        ),
    ],
)
def test_trl(build, tmp_path):
    """Losses and every metric are those of TRL alone."""
    torch.manual_seed(0)
    right = build(tmp_path)
    right.train()
    torch.manual_seed(0)
    ours = build(tmp_path)
    assert "TRL's fused LM head" in mstpass.compile_trainer(ours)
    ours.train()
    same(log(ours), log(right), tolerance=1e-3)
    assert heads() and {head.kind for head in heads()} == {"lm_head"}
