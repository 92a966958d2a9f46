"""Small Hugging Face models with their own losses, for benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

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


def _common(size: Size) -> dict[str, int]:
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


def llama(size: Size, dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_common(size), num_key_value_heads=2, use_cache=False)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def olmo2(size: Size, dropout: float) -> nn.Module:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(**_common(size), num_key_value_heads=2, use_cache=False)
    model: nn.Module = Olmo2ForCausalLM(config)
    return model


def gemma3(size: Size, dropout: float) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_common(size), num_key_value_heads=2, head_dim=size.width // 4, use_cache=False
    )
    model: nn.Module = Gemma3ForCausalLM(config)
    return model


def bert(size: Size, dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **_common(size), hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    model: nn.Module = BertForMaskedLM(config)
    return model


def gpt2(size: Size, dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=4,
        n_inner=size.mlp_width,
        n_positions=max(512, size.length),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    gpt = GPT2LMHeadModel(config)
    gpt.loss_type = "ForCausalLM"  # transformers cannot tell from its name
    model: nn.Module = gpt
    return model
