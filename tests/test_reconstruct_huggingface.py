"""Reconstruction in models of Hugging Face: fewer saved bytes, and gradients within tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mstpass.problem import solver_registry
from tests.checks import check_against_float64, joint_graph
from tests.reconstructed import EVERY_PLACE, MODES, save_at_every_place, save_plan, split_step

VOCAB = 600
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def _every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solver_registry.registered, EVERY_PLACE, save_at_every_place)


def _hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 2}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
        "gemma3": (
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            {"num_key_value_heads": 2, "head_dim": 8},
        ),
        "bert": ("BertConfig", "BertForMaskedLM", OFF),
    }
    config, model, extra = kinds[name]
    built: nn.Module = getattr(transformers, model)(
        getattr(transformers, config)(**SIZES, **TOKENS, **extra)
    )
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return built.train()


def _hf_loss(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    extra = {} if "Bert" in type(model).__name__ else {"use_cache": False}
    return lambda ids: model(input_ids=ids, labels=ids, **extra).loss


_MODELS = [
    (name, autocast) for name in ("olmo2", "gemma3", "bert", "llama") for autocast in (None, "cpu")
]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("name", "autocast"), _MODELS)
def test_hugging_face_models(name: str, autocast: str | None) -> None:
    model, ids = _hugging_face(name), torch.randint(3, VOCAB, (2, 64))
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with context:
            return _hf_loss(model)(ids)

    graph, outputs = joint_graph(loss, ids)
    saved = {mode: save_plan(split_step(graph, outputs, mode)).saved_bytes for mode in MODES}
    assert saved["tolerant"] <= saved["exact"] <= saved["off"]
    if name in ("olmo2", "gemma3") and autocast:
        assert saved["exact"] < saved["off"]
    check_against_float64(
        model,
        _hf_loss,
        [ids],
        autocast=autocast,
        memory_budget=0.0,
        chunk_tokens=64,
        reconstruct="tolerant",
        beyond=2e-6,  # docs/reconstruction.md: an inverse may add 1.2e-7, and each layer has some
    )
