"""Hugging Face models with their losses under Inductor: gradients against eager and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mstpass
from tests.checks import check_against_float64, kinds

pytestmark = pytest.mark.op_by_op

transformers = pytest.importorskip("transformers")

FULL = pytest.mark.full
VOCAB = 600
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _llama(**extra: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, **extra)
    return transformers.LlamaForCausalLM(config)


def _qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**SIZES, **TOKENS, num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def _gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, **TOKENS, **off
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.loss_type is None
    model.loss_type = "ForCausalLM"  # as ``mstpass.compile`` does
    return model


def _bert() -> nn.Module:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {**SIZES, "intermediate_size": 128}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, pad_token_id=0, **off))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "bert": _bert,
}


def _check(
    name: str, device: str, batch: int, seq: int, precision: str, **options: Any
) -> mstpass.Report:
    model = MODELS[name]().to(device).train()
    if precision == "bfloat16":
        model = model.bfloat16()
    extra = {} if name == "bert" else {"use_cache": False}
    ids = torch.randint(3, VOCAB, (batch, seq), device=device)
    labels = ids.clone()
    labels[:, :5] = -100

    def loss_of(m: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda ids, labels: m(input_ids=ids, labels=labels, **extra).loss

    autocast = device if precision == "autocast" else None
    report = check_against_float64(
        model, loss_of, [ids, labels], autocast=autocast, chunk_tokens=64, **options
    )
    assert kinds(report)[0] == ("lm_head", "fused"), report
    assert [kind for kind, _ in kinds(report)[1:]] == ["mlp", "mlp"], report
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "bert",
        *(pytest.param(n, marks=FULL) for n in ("llama_tied", "qwen3")),
    ],
)
def test_float32_ragged_batch(name: str, device: str) -> None:
    _check(name, device, batch=3, seq=43, precision="float32")


@FULL
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_float32_even_chunks(name: str, device: str) -> None:
    _check(name, device, batch=1, seq=128, precision="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama", "autocast"),
        ("bert", "bfloat16"),
        *(pytest.param(name, "bfloat16", marks=FULL) for name in ("llama", "gpt2", "qwen3")),
        *(pytest.param(name, "autocast", marks=FULL) for name in ("gpt2", "qwen3", "bert")),
    ],
)
def test_low_precision(name: str, precision: str, device: str) -> None:
    _check(name, device, batch=3, seq=43, precision=precision)


@FULL
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_least_memory(name: str, device: str) -> None:
    """Whole blocks are recomputed from what is alive between them."""
    plain = _check(name, device, batch=3, seq=43, precision="float32", chunk="auto")
    least = _check(name, device, batch=3, seq=43, precision="float32", memory_budget=0.0)
    assert least.outcome.save_plan is not None and least.outcome.save_plan.solver == "peak_search"
    assert least.saved_bytes < 0.6 * plain.saved_bytes


def test_a_model_without_a_loss_type_is_one_graph() -> None:
    """transformers warns at its loss, and Dynamo ends a graph at a warning."""
    model = _gpt2()
    model.loss_type = None
    ids = torch.randint(3, VOCAB, (2, 64))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    with pytest.raises(mstpass.ExplainError, match=r"model\.loss_type = 'ForCausalLM'"):
        mstpass.explain(loss, ids)
    before = loss(ids)
    mstpass.uncompile(mstpass.compile(model))
    assert loss(ids) == before
    report = mstpass.explain(loss, ids, options={"chunk_tokens": 32})
    assert kinds(report)[0] == ("lm_head", "fused")
