"""What a model of transformers must not have if ranks share its sequences.

A rank sees its own tokens, and in attention those of all ranks. So a model may mix tokens in
standard attention alone, and may compute nothing of a token from where it is in the rank's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from mstpass.sequences.attention import Split
from mstpass.sequences.ranks import Ranks
from mstpass.sequences.ring import ring_takes
from mstpass.sequences.rules import Rules

CAUSAL_LOSS = "ForCausalLM"
_LOSSES = (CAUSAL_LOSS, "ForMaskedLM", "ForTokenClassification")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BY_LENGTH = {"dynamic", "longrope"}  # transformers reads the length from the largest position


def check_model(model: Any, ranks: Ranks, split: Split) -> None:
    """Refuse a model whose sequences the ranks cannot share.

    Raises:
        ValueError: with all reasons.
    """
    heads = getattr(model.config, "num_attention_heads", None)
    if isinstance(heads, int) and (not split.exchanges_heads(heads, ranks) or ranks.ring):
        ring_takes(_rules_of(model.config), None, None, heads, ranks)
    reasons = list(_reasons(model))
    if reasons:
        raise ValueError(
            f"{type(model).__name__} cannot share sequences among ranks: {'; '.join(reasons)}"
        )


def _reasons(model: Any) -> Iterator[str]:
    config = model.config
    if config.get_text_config() is not config:
        yield (
            "it takes more than text, and its other parts see whole inputs: give its language "
            "model, and shard inputs_embeds"
        )
    if getattr(config, "is_encoder_decoder", False):
        yield "it attends from one sequence to another one: encoders and decoders alone are known"
    if not model.is_backend_compatible() or not _sets_attention(model):
        yield (
            "its attention does not go through transformers' AttentionInterface: in its code, call "
            "mstpass.sequence_parallel_attention in the place of scaled_dot_product_attention"
        )
    types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if types:
        yield f"layers of type {', '.join(sorted(types))} mix tokens in a way that is not known"
    mixers = [name for name, module in model.named_modules() if _mixes_tokens(module)]
    if mixers:
        yield f"{mixers[0]} mixes neighboring tokens, which other ranks may have"
    parameters = inspect.signature(model.forward).parameters
    numbered = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
    if "position_ids" not in parameters or numbered:
        yield "it numbers positions itself, and each rank would begin with the first one"
    by_length = _rotary_types(config) & _BY_LENGTH
    if by_length:
        kinds = ", ".join(sorted(by_length))
        yield f"its rotary embedding ({kinds}) changes with the length of a rank's part"
    if getattr(config, "output_router_logits", False):
        yield (
            "its load-balancing loss is of all tokens, and each rank would compute it of its own: "
            "config.output_router_logits=False"
        )
    if "labels" in parameters and loss_of(model) not in _LOSSES:
        yield f"its loss, {loss_of(model)}, is not one of separate tokens ({', '.join(_LOSSES)})"


def _rules_of(config: Any) -> Rules:
    """What a config says of attention: windows of some layers, and soft caps."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is not None and "sliding_attention" not in types:
        window = None
    return Rules(window=window, softcap=getattr(config, "attn_logit_softcapping", None))


def _rotary_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings, of which a config may have one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    each = [given, *(x for x in given.values() if isinstance(x, dict))]
    return {x["rope_type"] for x in each if "rope_type" in x}


def _sets_attention(model: Any) -> bool:
    library_says = getattr(type(model), "_can_set_attn_implementation", None)
    return library_says is None or bool(library_says())


def _mixes_tokens(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return any(size != 1 for size in module.kernel_size)
    return isinstance(module, nn.RNNBase)


def loss_of(model: Any) -> str:
    """The name of a model's loss in transformers; that of a causal model where it has none."""
    return getattr(model, "loss_type", None) or CAUSAL_LOSS


def has_own_loss(model: Any) -> bool:
    """Whether a model computes a loss of labels without transformers' loss functions.

    Those take the number of labels of a whole batch. A model that computes a mean itself does not.
    """
    forward = inspect.unwrap(type(model).forward)
    takes = "labels" in inspect.signature(forward).parameters
    return takes and "loss_function" not in forward.__code__.co_names
