"""Small Hugging Face models with their own losses, for benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    width: int = 256
    layers: int = 3
    mlp_width: int = 768
    vocabulary: int = 4096
    batch: int = 2
    length: int = 512


@dataclass(frozen=True)
class Case:
    """A model, its precision, and its dropout probability."""

    name: str
    build: Callable[[Size, float], nn.Module]
    autocast: bool
    dropout: float = 0.0

    @property
    def wins_exactly(self) -> bool:
        """Whether the exact rules reconstruct a value: they need casts or dropout masks."""
        return self.autocast or self.dropout > 0

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.name}, {'autocast bf16' if self.autocast else 'fp32'}{dropout}"


def workload(case: Case, size: Size, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A model in training mode, and token ids. The weights of norms are random, not all one."""
    torch.manual_seed(0)
    model = case.build(size, case.dropout).to(device).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model, torch.randint(3, size.vocabulary, (size.batch, size.length), device=device)


def loss_of(case: Case, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model's own loss as a function of token ids, in the precision of the case."""

    def loss(ids: Tensor) -> Tensor:
        context = torch.autocast(ids.device.type, torch.bfloat16, enabled=case.autocast)
        with context if case.autocast else contextlib.nullcontext():
            value: Tensor = model(input_ids=ids, labels=ids).loss
            return value

    return loss


def _built(model: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    """A model of transformers, by the names of its classes."""
    import transformers

    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return built


def _common(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": size.mlp_width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": max(512, size.length),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _grouped(size: Size) -> dict[str, Any]:
    """With two query heads for each key head."""
    return {**_common(size), "num_key_value_heads": 2, "use_cache": False}


def llama(size: Size, dropout: float) -> nn.Module:
    return _built("LlamaForCausalLM", "LlamaConfig", _grouped(size))


def olmo2(size: Size, dropout: float) -> nn.Module:
    return _built("Olmo2ForCausalLM", "Olmo2Config", _grouped(size))


def gemma3(size: Size, dropout: float) -> nn.Module:
    sizes = {**_grouped(size), "head_dim": size.width // 4}
    return _built("Gemma3ForCausalLM", "Gemma3TextConfig", sizes)


def bert(size: Size, dropout: float) -> nn.Module:
    drop = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    return _built("BertForMaskedLM", "BertConfig", {**_common(size), **drop})


def gpt2(size: Size, dropout: float) -> nn.Module:
    sizes = {
        "vocab_size": size.vocabulary,
        "n_embd": size.width,
        "n_layer": size.layers,
        "n_head": 4,
        "n_inner": size.mlp_width,
        "n_positions": max(512, size.length),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    }
    model: Any = _built("GPT2LMHeadModel", "GPT2Config", sizes)
    model.loss_type = "ForCausalLM"  # transformers cannot tell from its name
    return model
