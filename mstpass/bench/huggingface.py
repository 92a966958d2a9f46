"""Models of many Hugging Face architectures at a chosen scale, with batches and losses.

They are built from configurations; nothing is downloaded. MLPs are 1.5 to 4 times as wide as the
model, and vocabularies much wider, as in the real models.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Sizes = dict[str, Any]

_DEPTH = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
_DEPTH |= {"encoder_layers", "decoder_layers"}


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes that all architectures share, as far as they have them; by default tiny ones.

    Attributes:
        mlp_width: of gated MLPs; the others are four times as wide as the model.
        expert_width: of each expert, where experts have a width of their own.
        image_edge: in pixels; patches have four by four.
        longest_scan: of architectures whose scan is traced token by token; more sequences in turn.
    """

    vocabulary: int = 600
    width: int = 32
    heads: int = 4
    mlp_width: int = 96
    expert_width: int = 64
    experts: int = 4
    layers: int = 2
    batch: int = 2
    length: int = 80
    image_edge: int = 32
    images: int = 4
    longest_scan: int = 80

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def __str__(self) -> str:
        return (
            f"d={self.width}, L={self.layers}, {self.heads} heads, l={self.mlp_width} or "
            f"{4 * self.width}, V={self.vocabulary}, N={self.batch * self.length} (B={self.batch})"
        )


TINY = Scale()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to build one: the names of its classes in transformers and its configuration.

    Attributes:
        images: whether it reads images and not tokens.
        scan: whether it reads one token after the other.
        alike: whether all its layers are alike, so that one shows what is taken of each.
        float64: whether torch has all its ops in float64.
        loss_type: of transformers, where the name of the class does not tell.
    """

    model: str
    config: str
    sizes: Sizes
    scale: Scale
    images: bool = False
    scan: bool = False
    alike: bool = True
    float64: bool = True
    loss_type: str | None = None

    def build(
        self, dropout: float = 0.0, layers: int | None = None, seed: int = 0, **others: Any
    ) -> nn.Module:
        """The model in training mode.

        Args:
            layers: as many as this instead of the scale's.
            others: sizes in the place of the architecture's.
        """
        import transformers

        own = {} if layers is None or not self.alike else dict.fromkeys(self._depth(), layers)
        config = self.configuration(dropout, **own, **others)
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, self.model)(config)
        if self.loss_type is not None:
            model.loss_type = self.loss_type  # type: ignore[assignment]
        return model.train()

    def configuration(self, dropout: float = 0.0, **others: Any) -> Any:
        """That of transformers; ``others`` as of `build`."""
        import transformers

        config = getattr(transformers, self.config)(**{**self.sizes, **others})
        _set_dropout(config, dropout)
        return config

    def _depth(self) -> set[str]:
        return _DEPTH & self.sizes.keys()

    def batch(self) -> Batch:
        torch.manual_seed(1)
        scale = self.scale
        if self.images:
            edge, images = scale.image_edge, scale.images
            pixels = torch.randn(images, 3, edge, edge)
            return {"pixel_values": pixels, "labels": torch.randint(0, 10, (images,))}
        length = min(scale.length, scale.longest_scan) if self.scan else scale.length
        batch = scale.batch * scale.length // length
        ids = torch.randint(3, scale.vocabulary, (batch, length))
        labels = ids.clone()
        labels[:, :5] = -100
        return {"input_ids": ids, "labels": labels}

    def loss_of(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda **batch: model(**batch).loss


def _set_dropout(config: Any, p: float) -> None:
    """Every kind of dropout that a configuration knows; whole layers are never dropped."""
    for name, value in vars(config).items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            if "layerdrop" in name:
                setattr(config, name, 0.0)
            elif "dropout" in name or "pdrop" in name:
                setattr(config, name, p)


TOKENS: Sizes = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


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


def _sizes(
    scale: Scale,
    width: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    **extra: Any,
) -> Sizes:
    """Sizes by the names that a configuration has for them.

    Args:
        extra: further sizes; None leaves one out.
    """
    common = {width: scale.width, layers: scale.layers, heads: scale.heads}
    sizes = {**common, "vocab_size": scale.vocabulary, **extra}
    return {name: size for name, size in sizes.items() if size is not None}


def _causal(
    scale: Scale, name: str, config: str = "", alike: bool = True, **extra: Any
) -> Architecture:
    """A decoder with Llama's sizes and ``extra`` ones."""
    llama: Sizes = {
        "intermediate_size": scale.mlp_width,
        "num_key_value_heads": scale.heads // 2,
        "max_position_embeddings": max(2048, scale.length + 2),
        "use_cache": False,
        **TOKENS,
    }
    sizes = _sizes(scale, **{**llama, **extra})
    names = (f"{name}ForCausalLM", config or f"{name}Config")
    experts = any("expert" in key for key in sizes)
    return Architecture(*names, sizes, scale, alike=alike, float64=not experts)


def _gpt2(
    scale: Scale, model: str, config: str, loss_type: str | None = None, **extra: Any
) -> Architecture:
    """A decoder with GPT-2's sizes and ``extra`` ones."""
    positions = max(1024, scale.length)
    gpt2: Sizes = {"n_positions": positions, "use_cache": False, **TOKENS, **extra}
    sizes = _sizes(scale, width="n_embd", layers="n_layer", heads="n_head", **gpt2)
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
    opt: Sizes = {"ffn_dim": mlp, "word_embed_proj_dim": scale.width, "intermediate_size": None}
    neo: Sizes = {
        "layers": "num_layers",
        "heads": "num_heads",
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 32,
        "intermediate_size": mlp,
    }
    neox: Sizes = {"intermediate_size": mlp}
    ungrouped: Sizes = {"num_key_value_heads": None}
    return {
        "opt": _causal(scale, "OPT", **opt, **ungrouped),
        "gpt2": _gpt2(scale, "GPT2LMHeadModel", "GPT2Config", loss_type="ForCausalLM"),
        "gpt-neo": _causal(scale, "GPTNeo", alike=False, **neo, **ungrouped),
        "gpt-neox": _causal(scale, "GPTNeoX", **neox, **ungrouped),
        "gpt-j": _gpt2(scale, "GPTJForCausalLM", "GPTJConfig", **turned),
        "codegen": _gpt2(scale, "CodeGenForCausalLM", "CodeGenConfig", **turned),
    }


def _other_decoders(scale: Scale) -> dict[str, Architecture]:
    bloom = _sizes(scale, layers="n_layer", heads="n_head", use_cache=False, **TOKENS)
    mpt = _sizes(scale, width="d_model", layers="n_layers", heads="n_heads", use_cache=False)
    mpt["max_seq_len"] = max(2048, scale.length)
    mamba = _sizes(scale, state_size=4, num_attention_heads=None, use_cache=False, **TOKENS)
    mamba["num_hidden_layers"] = 1  # a step of its scan is a dozen nodes
    return {
        "bloom": Architecture("BloomForCausalLM", "BloomConfig", bloom, scale),
        "mpt": Architecture("MptForCausalLM", "MptConfig", mpt, scale),
        "mamba": Architecture("MambaForCausalLM", "MambaConfig", mamba, scale, scan=True),
    }


def _experts(scale: Scale) -> dict[str, Architecture]:
    """Mixtures of experts, two for each token."""
    head: Sizes = {"head_dim": scale.head_width}
    own_width: Sizes = {"moe_intermediate_size": scale.expert_width}
    local: Sizes = {"num_local_experts": scale.experts}
    two: Sizes = {"num_experts_per_tok": 2}
    deepseek: Sizes = {
        "num_key_value_heads": scale.heads,
        "n_routed_experts": scale.experts,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), scale.width // 2),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), scale.head_width),
    }
    llama4: Sizes = {"config": "Llama4TextConfig", "intermediate_size_mlp": scale.mlp_width}
    qwen3: Sizes = {"num_experts": scale.experts}
    return {
        "mixtral": _causal(scale, "Mixtral", **local),
        "qwen3-moe": _causal(scale, "Qwen3Moe", **qwen3, **two, **head, **own_width),
        "gpt-oss": _causal(scale, "GptOss", **local, **two, **head),
        "llama4": _causal(scale, "Llama4", **llama4, **local, **two, **head),
        "deepseek-v3": _causal(scale, "DeepseekV3", alike=False, **deepseek, **two, **own_width),
    }


def _encoders(scale: Scale) -> dict[str, Architecture]:
    mlp = 4 * scale.width
    positions = max(2048, scale.length + 2)

    def masked(name: str, **extra: Any) -> Architecture:
        sizes = _sizes(scale, intermediate_size=mlp, max_position_embeddings=positions, **extra)
        return Architecture(f"{name}ForMaskedLM", f"{name}Config", {**TOKENS, **sizes}, scale)

    distilbert = _sizes(scale, width="dim", layers="n_layers", heads="n_heads", hidden_dim=mlp)
    distilbert |= {"max_position_embeddings": max(512, scale.length), "pad_token_id": 0}
    image: Sizes = {"image_size": scale.image_edge, "patch_size": 4, "num_labels": 10}
    vit = _sizes(scale, intermediate_size=mlp, vocab_size=None, **image)
    relative: Sizes = {"pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
    return {
        "bert": masked("Bert"),
        "roberta": masked("Roberta"),
        "electra": masked("Electra", embedding_size=scale.width),
        "distilbert": Architecture("DistilBertForMaskedLM", "DistilBertConfig", distilbert, scale),
        "albert": masked("Albert", embedding_size=scale.width // 2),
        "modernbert": masked("ModernBert", cls_token_id=1, sep_token_id=2),
        "deberta-v2": masked("DebertaV2", relative_attention=True, **relative),
        "vit": Architecture("ViTForImageClassification", "ViTConfig", vit, scale, images=True),
    }


def _encoder_decoders(scale: Scale) -> dict[str, Architecture]:
    mlp = 4 * scale.width
    t5 = _sizes(scale, width="d_model", layers="num_layers", heads="num_heads", use_cache=False)
    t5 |= {"d_ff": mlp, "d_kv": scale.head_width, "decoder_start_token_id": 0}
    names: Sizes = {
        "width": "d_model",
        "layers": "encoder_layers",
        "heads": "encoder_attention_heads",
    }
    bart = _sizes(scale, **names, use_cache=False, **TOKENS)
    bart |= {
        "decoder_layers": scale.layers,
        "decoder_attention_heads": scale.heads,
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), mlp),
        **dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id"), 2),
        "max_position_embeddings": max(1024, scale.length),
    }
    return {
        "t5": Architecture("T5ForConditionalGeneration", "T5Config", t5, scale),
        "bart": Architecture("BartForConditionalGeneration", "BartConfig", bart, scale),
    }


# ---- small ones with their own losses ------------------------------------------------------------
MEDIUM = Scale(4096, 256, mlp_width=768, layers=3, length=512)
_SIZES = ("width", "layers", "mlp_width", "vocabulary", "batch", "length")


def sized(*values: int, **named: int) -> Scale:
    """One that differs from ``MEDIUM`` in the first of these sizes, or in named ones."""
    return dataclasses.replace(MEDIUM, **dict(zip(_SIZES, values, strict=False)), **named)


@dataclasses.dataclass(frozen=True)
class Case:
    """An architecture by its name, its precision, and its dropout probability."""

    name: str
    architecture: str
    autocast: bool
    dropout: float = 0.0

    @property
    def wins_exactly(self) -> bool:
        """Whether the exact rules reconstruct a value: they need casts or dropout masks."""
        return self.autocast or self.dropout > 0

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.name}, {'autocast bf16' if self.autocast else 'fp32'}{dropout}"

    def build(self, scale: Scale, seed: int = 0) -> nn.Module:
        """The model, with positions for a batch alone; its MLPs are as wide as gated ones."""
        names = ("max_position_embeddings", "n_positions"), ("intermediate_size", "n_inner")
        values = max(512, scale.length), scale.mlp_width
        sizes = {n: value for each, value in zip(names, values, strict=True) for n in each}
        return architectures(scale)[self.architecture].build(self.dropout, seed=seed, **sizes)


def workload(case: Case, size: Scale, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """A model in training mode, and token ids. The weights of norms are random, not all one."""
    model = case.build(size).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model, torch.randint(3, size.vocabulary, (size.batch, size.length), device=device)


def loss_of(case: Case, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's own loss as a function of token ids, in the precision of the case."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        context = torch.autocast(ids.device.type, torch.bfloat16, enabled=case.autocast)
        with context if case.autocast else contextlib.nullcontext():
            value: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return value

    return loss
