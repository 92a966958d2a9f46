"""Sequence parallel training of a model of transformers whose code stays as it is.

Attention of most models goes through transformers' ``AttentionInterface``: a function that is
registered under a name, which a model's config chooses. Here one is registered for each group of
ranks. Everything else of such a model works token by token, but for a few things that
`sequence_parallel` looks for (`check_model`) and the loss, of which `shard_sequence` says what
it is to be divided by.

A mask function is registered under the same name. transformers calls it to make masks of this
rank's tokens, which would be wrong; the documents that `shard_sequence` gives have four dims, and
transformers hands masks of four dims to attention as they are.

**Checks of a model**: what it must not have if ranks share its sequences. A rank sees its own
tokens, and in attention those of all ranks. So a model may mix tokens in standard attention alone,
and may compute nothing of a token from where it is in the rank's part.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from mstpass.sequences.attention import Method, Split, attention_of_ranks, whole_documents
from mstpass.sequences.ranks import Group, Ranks, ranks_of
from mstpass.sequences.ring import ring_takes
from mstpass.sequences.rules import Rules

M = TypeVar("M", bound=nn.Module)
_NAME = "mstpass_sequence_parallel"
# arguments of attention functions that say what this one does not do, with what does it
_NOT_KNOWN = {
    "position_bias": "biases of positions are of whole rows of scores",
    "head_mask": "masks of heads are not known to it",
    "block_table": "paged attention is for generation",
}


def sequence_parallel(
    model: M, mesh_or_group: Group = None, method: Method = "auto", head_groups: int = 1
) -> M:
    """Let a model of transformers take its rank's part of each sequence.

    The model is changed in place and returned: its attention exchanges keys, values and queries
    between the ranks, and everything else works on the rank's tokens. Call it before FSDP2's
    ``fully_shard`` and before ``mstpass.compile``; give it batches of `mstpass.shard_sequence`.

    Args:
        model: a model of text, causal or an encoder, or a module around one (PEFT).
        mesh_or_group: the ranks that share a sequence: a process group, a device mesh of one dim
            (``mesh["sequence"]``), or of two (``mesh["ring", "heads"]``: a ring of rows of ranks
            that exchange heads), or None for all ranks.
        method: ``"ulysses"`` gives each rank all tokens of some heads; ``"ring"`` sends keys and
            values round, for more ranks than heads; ``"auto"`` takes the first that fits.
        head_groups: Ulysses runs for so many groups of heads, one after the other: less memory, in
            more and smaller exchanges.

    Raises:
        ValueError: the model has something that the ranks cannot share, or there are no ranks.
    """
    ranks, split = ranks_of(mesh_or_group), Split(method, head_groups)
    models = list(_outermost(model))
    if not models:
        raise ValueError(
            f"{type(model).__name__} holds no model of transformers: in a model of your own, call "
            "mstpass.sequence_parallel_attention in the place of scaled_dot_product_attention"
        )
    for each in models:
        check_model(each, ranks, split)
    name = _registered(ranks, split)
    for each in models:
        each.set_attn_implementation(name)
        _check_calls(each, name, ranks)
    return model


def _outermost(module: nn.Module) -> Iterator[Any]:
    """The models of transformers in a module that are in no other one."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    if isinstance(module, library.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _registered(ranks: Ranks, split: Split) -> str:
    """The name under which transformers knows attention of these ranks."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = f"{_NAME}_{split.method}_{split.head_groups}_{ranks.name}"
    AttentionInterface.register(name, _attention(ranks, split))
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _attention(ranks: Ranks, split: Split) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **other: Any,
    ) -> tuple[Tensor, None]:
        for name, why in _NOT_KNOWN.items():
            if other.get(name) is not None:
                raise ValueError(f"sequence parallel attention got {name}: {why}")
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"attention has {query.shape[2]} queries and {key.shape[2]} keys on this rank: a "
                "sequence that ranks share has no cache and no second sequence (use_cache=False)"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        documents = None
        if attention_mask is not None:
            documents = whole_documents(attention_mask, query, ranks)
        rules = Rules(causal, scaling, dropout, sliding_window, softcap, documents, s_aux)
        return attention_of_ranks(query, key, value, ranks, rules, split), None

    return attention


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """In the place of a mask of this rank's tokens: attention makes its own.

    Raises:
        ValueError: there is padding that attention would not see, or a mask of the model's own.
    """
    if attention_mask is not None:
        raise ValueError(
            f"the model got an attention_mask of {list(attention_mask.shape)}, of this rank's "
            "tokens, and attention reads those of all ranks: give the mask of the whole batch to "
            "mstpass.shard_sequence, and its result to the model"
        )
    if kwargs.get("use_vmap"):
        raise ValueError(
            "the model has a mask function of its own, which knows this rank's tokens alone"
        )


def _check_calls(model: Any, name: str, ranks: Ranks) -> None:
    """Refuse calls that would be wrong: with a cache, with tokens that each rank numbers from 0, or
    with a loss that is a rank's own mean."""
    parameters = list(inspect.signature(model.forward).parameters)
    own_loss = has_own_loss(model)

    def check(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if module.config._attn_implementation != name:
            return None  # it has another attention again, for generation
        given: Mapping[str, Any] = {**dict(zip(parameters, args, strict=False)), **kwargs}
        cached = [key for key in ("use_cache", "past_key_values", "cache") if given.get(key)]
        if cached:
            raise ValueError(
                f"{cached[0]} was given, and a sequence that ranks share has no cache: leave it "
                "out; for generation, model.set_attn_implementation('sdpa') brings back attention "
                "of one process"
            )
        if ranks.size > 1 and given.get("position_ids") is None:
            raise ValueError(
                "the model got no position_ids, and each rank would number its tokens from 0: give "
                "the model all that mstpass.shard_sequence returns"
            )
        if own_loss and given.get("labels") is not None:
            raise ValueError(
                f"{type(module).__name__} computes its loss as a mean over this rank's labels, "
                "which is wrong for ranks with different numbers of them: leave labels out of the "
                "call, and divide the sum of the losses of its logits by num_items_in_batch"
            )
        without = {"use_cache": False} if "use_cache" in parameters else {}
        return args, {**kwargs, **without}

    model.register_forward_pre_hook(check, with_kwargs=True)
    if "labels" in parameters and not own_loss:
        model.loss_function = _checked_loss(model.loss_function, loss_of(model))


def _checked_loss(loss: Callable[..., Tensor], kind: str) -> Callable[..., Tensor]:
    """A model's loss function that refuses labels of this rank alone."""

    @functools.wraps(loss)
    def checked(*args: Any, **kwargs: Any) -> Tensor:
        shifted = kwargs.get("shift_labels") is not None
        if kwargs.get("num_items_in_batch") is None or (kind == CAUSAL_LOSS and not shifted):
            raise ValueError(
                "the loss got labels of this rank without those of the other ones: give the model "
                "all that mstpass.shard_sequence returns. If it did, this model does not hand it "
                "on to its loss: compute the loss of its logits yourself"
            )
        if kind != CAUSAL_LOSS and shifted:
            raise ValueError(
                "labels are shifted by one token, and this model's loss is not that of a causal "
                "model: mstpass.shard_sequence(..., causal=False)"
            )
        return loss(*args, **kwargs)

    return checked


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
        ring_takes(_rules_of(model.config), heads, ranks)
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
