"""Tiny models of many Hugging Face architectures, built from configurations, and a batch for each.

Sizes are such that each MLP widens by at least 1.5 and each head by far more, as in the real
models. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB, HIDDEN, WIDTH, BATCH, SEQ = 600, 32, 96, 2, 80

Batch = dict[str, torch.Tensor]

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MOE = {"moe_intermediate_size": 64}


_DEPTH = {
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to build one: the names of its classes in transformers and its tiny configuration."""

    model: str
    config: str
    sizes: dict[str, Any]
    images: bool = False
    alike: bool = True  # all layers are alike, so that one shows what is taken of each
    float64: bool = True  # whether torch has all its ops in float64
    loss_type: str | None = None
    call: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self, dropout: float = 0.0, layers: int = 2) -> nn.Module:
        import transformers

        depth = dict.fromkeys(_DEPTH & self.sizes.keys(), layers) if self.alike else {}
        config = getattr(transformers, self.config)(**{**self.sizes, **depth})
        _set_dropout(config, dropout)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config)
        if self.loss_type is not None:
            model.loss_type = self.loss_type  # type: ignore[assignment]
        return model.train()

    def batch(self) -> Batch:
        torch.manual_seed(1)
        if self.images:
            return {
                "pixel_values": torch.randn(4, 3, 32, 32),
                "labels": torch.randint(0, 10, (4,)),
            }
        ids = torch.randint(3, VOCAB, (BATCH, SEQ))
        labels = ids.clone()
        labels[:, :5] = -100
        return {"input_ids": ids, "labels": labels}

    def loss_of(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda **batch: model(**batch, **self.call).loss


def _set_dropout(config: Any, p: float) -> None:
    """Every kind of dropout that a configuration knows; whole layers are never dropped."""
    for name, value in vars(config).items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            if "layerdrop" in name:
                setattr(config, name, 0.0)
            elif "dropout" in name or "pdrop" in name:
                setattr(config, name, p)


def _causal(
    name: str, *, model: str = "", config: str = "", alike: bool = True, **extra: Any
) -> Architecture:
    """Llama's names for sizes; ``extra`` adds to them or, with None, leaves one out."""
    sizes = {**SIZES, **TOKENS, "num_key_value_heads": 2, "use_cache": False, **extra}
    sizes = {k: v for k, v in sizes.items() if v is not None}
    names = (model or f"{name}ForCausalLM", config or f"{name}Config")
    experts = any("expert" in key for key in sizes)
    return Architecture(*names, sizes, alike=alike, float64=not experts)


def _masked(name: str, **extra: Any) -> Architecture:
    sizes = {**SIZES, **TOKENS, "intermediate_size": 4 * HIDDEN, **extra}
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", sizes)


_GPT2_NAMES = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, **TOKENS}

ARCHITECTURES: dict[str, Architecture] = {
    # decoders
    "llama": _causal("Llama"),
    "llama-tied": _causal("Llama", tie_word_embeddings=True),
    "mistral": _causal("Mistral"),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=8),
    "gemma": _causal("Gemma", head_dim=8),
    "gemma2": _causal("Gemma2", head_dim=8),
    "gemma3": _causal("Gemma3", config="Gemma3TextConfig", head_dim=8),
    "phi": _causal("Phi", num_key_value_heads=4),
    "phi3": _causal("Phi3"),
    "olmo": _causal("Olmo"),
    "olmo2": _causal("Olmo2"),
    "smollm3": _causal("SmolLM3"),
    "stablelm": _causal("StableLm", num_key_value_heads=4),
    "starcoder2": _causal("Starcoder2", intermediate_size=4 * HIDDEN),
    "cohere": _causal("Cohere"),
    "granite": _causal("Granite"),
    "nemotron": _causal("Nemotron"),
    "helium": _causal("Helium", head_dim=8),
    "glm": _causal("Glm", head_dim=8),
    "ernie4_5": _causal("Ernie4_5", head_dim=8),
    "falcon": _causal("Falcon", intermediate_size=None, num_key_value_heads=None),
    "opt": _causal(
        "OPT",
        intermediate_size=None,
        num_key_value_heads=None,
        ffn_dim=4 * HIDDEN,
        word_embed_proj_dim=HIDDEN,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_GPT2_NAMES, "use_cache": False},
        loss_type="ForCausalLM",
    ),
    "gpt-neo": _causal(
        "GPTNeo",
        alike=False,
        num_attention_heads=None,
        num_hidden_layers=None,
        num_key_value_heads=None,
        num_heads=4,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        window_size=32,
    ),
    "gpt-neox": _causal("GPTNeoX", num_key_value_heads=None, intermediate_size=4 * HIDDEN),
    "gpt-j": Architecture(
        "GPTJForCausalLM", "GPTJConfig", {**_GPT2_NAMES, "rotary_dim": 8, "use_cache": False}
    ),
    "codegen": Architecture(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {**_GPT2_NAMES, "rotary_dim": 8, "use_cache": False},
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {
            "hidden_size": HIDDEN,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": VOCAB,
            "use_cache": False,
            **TOKENS,
        },
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        "MptConfig",
        {"d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB, "use_cache": False},
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": 1,  # a step of its scan is a dozen nodes
            "state_size": 4,
            "vocab_size": VOCAB,
            "use_cache": False,
            **TOKENS,
        },
    ),
    # mixtures of experts
    "mixtral": _causal("Mixtral", num_local_experts=4),
    "qwen3-moe": _causal("Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, **MOE),
    "gpt-oss": _causal("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "deepseek-v3": _causal(
        "DeepseekV3",
        alike=False,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **MOE,
    ),
    # encoders
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "electra": _masked("Electra", embedding_size=HIDDEN),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "dim": HIDDEN,
            "hidden_dim": 4 * HIDDEN,
            "n_layers": 2,
            "n_heads": 4,
            "vocab_size": VOCAB,
            "pad_token_id": 0,
        },
    ),
    "albert": _masked("Albert", embedding_size=16),
    "modernbert": _masked("ModernBert", cls_token_id=1, sep_token_id=2),
    "deberta-v2": _masked(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
            "num_labels": 10,
        },
        images=True,
    ),
    # encoders with decoders
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": HIDDEN,
            "d_ff": 4 * HIDDEN,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCAB,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "d_model": HIDDEN,
            "encoder_ffn_dim": 4 * HIDDEN,
            "decoder_ffn_dim": 4 * HIDDEN,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": VOCAB,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
            "use_cache": False,
            **TOKENS,
        },
    ),
}
