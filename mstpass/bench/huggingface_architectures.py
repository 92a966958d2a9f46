"""Models of many Hugging Face architectures at a chosen scale.

They are built from configurations; nothing is downloaded. MLPs are 1.5 to 4 times as wide as the
model, and vocabularies much wider, as in the real models.
"""

from __future__ import annotations

from typing import Any

from mstpass.bench.huggingface_architecture import Architecture, Scale, Sizes

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def architectures(scale: Scale) -> dict[str, Architecture]:
    """All of them by name, in the order of the documentation's table."""
    return {
        **_like_llama(scale),
        **_like_gpt(scale),
        **_other_decoders(scale),
        **_experts(scale),
        **_encoders(scale),
        **_encoder_decoders(scale),
    }


def _common(scale: Scale) -> Sizes:
    return {
        "hidden_size": scale.width,
        "intermediate_size": scale.mlp_width,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.heads,
        "vocab_size": scale.vocabulary,
        "max_position_embeddings": max(2048, scale.length + 2),
        **TOKENS,
    }


def _causal(
    scale: Scale,
    name: str,
    *,
    config: str = "",
    alike: bool = True,
    **extra: Any,
) -> Architecture:
    """Llama's names for sizes; ``extra`` adds to them or, with None, leaves one out."""
    pairs = scale.heads // 2
    sizes = {**_common(scale), "num_key_value_heads": pairs, "use_cache": False, **extra}
    sizes = {k: v for k, v in sizes.items() if v is not None}
    names = (f"{name}ForCausalLM", config or f"{name}Config")
    experts = any("expert" in key for key in sizes)
    return Architecture(*names, sizes, scale, alike=alike, float64=not experts)


def _gpt2(
    scale: Scale, model: str, config: str, loss_type: str | None = None, **extra: Any
) -> Architecture:
    """GPT-2's names for sizes; ``extra`` adds to them."""
    sizes = {
        "n_embd": scale.width,
        "n_layer": scale.layers,
        "n_head": scale.heads,
        "n_positions": max(1024, scale.length),
        "vocab_size": scale.vocabulary,
        "use_cache": False,
        **TOKENS,
        **extra,
    }
    return Architecture(model, config, sizes, scale, loss_type=loss_type)


def _like_llama(scale: Scale) -> dict[str, Architecture]:
    def causal(name: str, **extra: Any) -> Architecture:
        return _causal(scale, name, **extra)

    head: Sizes = {"head_dim": scale.head_width}
    return {
        "llama": causal("Llama"),
        "llama-tied": causal("Llama", tie_word_embeddings=True),
        "mistral": causal("Mistral"),
        "qwen2": causal("Qwen2"),
        "qwen3": causal("Qwen3", **head),
        "gemma": causal("Gemma", **head),
        "gemma2": causal("Gemma2", **head),
        "gemma3": causal("Gemma3", config="Gemma3TextConfig", **head),
        "phi": causal("Phi", num_key_value_heads=scale.heads),
        "phi3": causal("Phi3"),
        "olmo": causal("Olmo"),
        "olmo2": causal("Olmo2"),
        "smollm3": causal("SmolLM3"),
        "stablelm": causal("StableLm", num_key_value_heads=scale.heads),
        "starcoder2": causal("Starcoder2", intermediate_size=4 * scale.width),
        "cohere": causal("Cohere"),
        "granite": causal("Granite"),
        "nemotron": causal("Nemotron"),
        "helium": causal("Helium", **head),
        "glm": causal("Glm", **head),
        "ernie4_5": causal("Ernie4_5", **head),
        "falcon": causal("Falcon", intermediate_size=None, num_key_value_heads=None),
    }


def _like_gpt(scale: Scale) -> dict[str, Architecture]:
    turned: Sizes = {"rotary_dim": min(64, scale.head_width)}
    mlp = 4 * scale.width
    return {
        "opt": _causal(
            scale,
            "OPT",
            intermediate_size=None,
            num_key_value_heads=None,
            ffn_dim=mlp,
            word_embed_proj_dim=scale.width,
        ),
        "gpt2": _gpt2(scale, "GPT2LMHeadModel", "GPT2Config", loss_type="ForCausalLM"),
        "gpt-neo": _causal(
            scale,
            "GPTNeo",
            alike=False,
            num_attention_heads=None,
            num_hidden_layers=None,
            num_key_value_heads=None,
            num_heads=scale.heads,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            window_size=32,
            intermediate_size=mlp,
        ),
        "gpt-neox": _causal(scale, "GPTNeoX", num_key_value_heads=None, intermediate_size=mlp),
        "gpt-j": _gpt2(scale, "GPTJForCausalLM", "GPTJConfig", **turned),
        "codegen": _gpt2(scale, "CodeGenForCausalLM", "CodeGenConfig", **turned),
    }


def _other_decoders(scale: Scale) -> dict[str, Architecture]:
    return {
        "bloom": Architecture(
            "BloomForCausalLM",
            "BloomConfig",
            {
                "hidden_size": scale.width,
                "n_layer": scale.layers,
                "n_head": scale.heads,
                "vocab_size": scale.vocabulary,
                "use_cache": False,
                **TOKENS,
            },
            scale,
        ),
        "mpt": Architecture(
            "MptForCausalLM",
            "MptConfig",
            {
                "d_model": scale.width,
                "n_layers": scale.layers,
                "n_heads": scale.heads,
                "max_seq_len": max(2048, scale.length),
                "vocab_size": scale.vocabulary,
                "use_cache": False,
            },
            scale,
        ),
        "mamba": Architecture(
            "MambaForCausalLM",
            "MambaConfig",
            {
                "hidden_size": scale.width,
                "num_hidden_layers": 1,  # a step of its scan is a dozen nodes
                "state_size": 4,
                "vocab_size": scale.vocabulary,
                "use_cache": False,
                **TOKENS,
            },
            scale,
            scan=True,
        ),
    }


def _experts(scale: Scale) -> dict[str, Architecture]:
    """Mixtures of experts, two for each token."""
    head: Sizes = {"head_dim": scale.head_width}
    own_width: Sizes = {"moe_intermediate_size": scale.expert_width}
    return {
        "mixtral": _causal(scale, "Mixtral", num_local_experts=scale.experts),
        "qwen3-moe": _causal(
            scale,
            "Qwen3Moe",
            num_experts=scale.experts,
            num_experts_per_tok=2,
            **head,
            **own_width,
        ),
        "gpt-oss": _causal(
            scale, "GptOss", num_local_experts=scale.experts, num_experts_per_tok=2, **head
        ),
        "llama4": _causal(
            scale,
            "Llama4",
            config="Llama4TextConfig",
            num_local_experts=scale.experts,
            num_experts_per_tok=2,
            intermediate_size_mlp=scale.mlp_width,
            **head,
        ),
        "deepseek-v3": _causal(
            scale,
            "DeepseekV3",
            alike=False,
            num_key_value_heads=scale.heads,
            n_routed_experts=scale.experts,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=scale.width // 2,
            kv_lora_rank=scale.width // 2,
            qk_rope_head_dim=scale.head_width,
            qk_nope_head_dim=scale.head_width,
            v_head_dim=scale.head_width,
            **own_width,
        ),
    }


def _encoders(scale: Scale) -> dict[str, Architecture]:
    def masked(name: str, **extra: Any) -> Architecture:
        sizes = {**_common(scale), "intermediate_size": 4 * scale.width, **extra}
        return Architecture(f"{name}ForMaskedLM", f"{name}Config", sizes, scale)

    return {
        "bert": masked("Bert"),
        "roberta": masked("Roberta"),
        "electra": masked("Electra", embedding_size=scale.width),
        "distilbert": Architecture(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            {
                "dim": scale.width,
                "hidden_dim": 4 * scale.width,
                "n_layers": scale.layers,
                "n_heads": scale.heads,
                "max_position_embeddings": max(512, scale.length),
                "vocab_size": scale.vocabulary,
                "pad_token_id": 0,
            },
            scale,
        ),
        "albert": masked("Albert", embedding_size=scale.width // 2),
        "modernbert": masked("ModernBert", cls_token_id=1, sep_token_id=2),
        "deberta-v2": masked(
            "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16
        ),
        "vit": Architecture(
            "ViTForImageClassification",
            "ViTConfig",
            {
                "hidden_size": scale.width,
                "intermediate_size": 4 * scale.width,
                "num_hidden_layers": scale.layers,
                "num_attention_heads": scale.heads,
                "image_size": scale.image_edge,
                "patch_size": 4,
                "num_labels": 10,
            },
            scale,
            images=True,
        ),
    }


def _encoder_decoders(scale: Scale) -> dict[str, Architecture]:
    return {
        "t5": Architecture(
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "d_model": scale.width,
                "d_ff": 4 * scale.width,
                "d_kv": scale.head_width,
                "num_layers": scale.layers,
                "num_heads": scale.heads,
                "vocab_size": scale.vocabulary,
                "decoder_start_token_id": 0,
                "use_cache": False,
            },
            scale,
        ),
        "bart": Architecture(
            "BartForConditionalGeneration",
            "BartConfig",
            {
                "d_model": scale.width,
                "encoder_ffn_dim": 4 * scale.width,
                "decoder_ffn_dim": 4 * scale.width,
                "encoder_layers": scale.layers,
                "decoder_layers": scale.layers,
                "encoder_attention_heads": scale.heads,
                "decoder_attention_heads": scale.heads,
                "max_position_embeddings": max(1024, scale.length),
                "vocab_size": scale.vocabulary,
                "decoder_start_token_id": 2,
                "forced_eos_token_id": 2,
                "use_cache": False,
                **TOKENS,
            },
            scale,
        ),
    }
