"""One sequence on several ranks: gradients of tiny models against one process, compiled by mst.

A case runs a model on the whole batch without ``torch.compile``, and the same model on this rank's
part, in one graph. The gradients of the ranks are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import mstpass

VOCABULARY, LENGTH = 96, 37  # tokens, whose number no number of ranks divides
Batch = dict[str, Any]
Finding = dict[str, Any]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def model_of(name: str, **changes: Any) -> nn.Module:
    """A tiny model of transformers, such as "Llama", with the same weights on every rank."""
    kind, _, task = name.partition(" ")
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}For{task or 'CausalLM'}")(config)
    model.set_attn_implementation("eager")
    return model.train()


def batch_of(rows: int = 2, length: int = LENGTH) -> Batch:
    """Ids and labels. The first third has no labels, so that ranks have unequal numbers."""
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def right_of(model: nn.Module, *batches: Batch) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one process, over several batches as if they were one."""
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
    count = torch.stack(counts).sum().clamp(min=1)
    loss = torch.zeros(())
    for batch in batches:
        own = model(**batch, num_items_in_batch=count, use_cache=False).loss
        own.backward()
        loss += own.detach()
    return float(loss), gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [gradient.detach().clone() for gradient in found]


def errors(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of a gradient, relative to it, or to the largest of all."""
    most = max(float(b.norm()) for b in right) + 1e-30
    pairs = zip(found, right, strict=True)
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-3 * most) for a, b in pairs)


def added(values: list[Tensor]) -> list[Tensor]:
    for value in values:
        dist.all_reduce(value)
    return values


def compared(
    model: Callable[[], nn.Module],
    *batches: Batch,
    group: Any = None,
    method: Any = "auto",
    **how: Any,
) -> Finding:
    """The error against one process, and how many graphs there are."""
    loss, right = right_of(model(), *batches)
    shared = mstpass.sequence_parallel(model(), group, method)
    compiled = torch.compile(shared, backend="mst", fullgraph=True)
    before = len(mstpass.reports())
    found = 0.0
    for batch in batches:
        part = mstpass.shard_sequence(batch, group, gradients="sum", **how)
        value = compiled(**part).loss
        value.backward()
        found += float(value)
    total = added([torch.tensor(found, dtype=torch.float64)])[0]
    return {
        "error": errors(added(gradients(shared)), right),
        "loss": abs(float(total) - loss) / max(loss, 1e-9),
        "graphs": len(mstpass.reports()) - before,
    }


# ---- models --------------------------------------------------------------------------------------
def llama() -> Finding:
    return compared(lambda: model_of("Llama"), batch_of())


def one_key_value_head() -> Finding:
    return compared(lambda: model_of("Llama", num_key_value_heads=1), batch_of())


def odd_key_value_heads() -> Finding:
    """Three key-value heads of six: two ranks have one and a half each."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 3}
    return compared(lambda: model_of("Llama", **sizes), batch_of())


def all_heads() -> Finding:
    return compared(lambda: model_of("Llama", num_key_value_heads=4), batch_of())


def learned_positions() -> Finding:
    sizes = {"n_positions": LENGTH + 3, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return compared(lambda: model_of("GPT2 LMHeadModel", **sizes), batch_of())


def window() -> Finding:
    return compared(lambda: model_of("Mistral", sliding_window=7), batch_of())


def softcap() -> Finding:
    """Windows in every other layer, and capped scores that are large enough to feel it."""
    sizes = {"sliding_window": 9, "attn_logit_softcapping": 0.3, "query_pre_attn_scalar": 8}
    return compared(lambda: model_of("Gemma2", **sizes), batch_of())


def sinks() -> Finding:
    sizes = {
        "sliding_window": 9,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }

    def build() -> nn.Module:
        model = model_of("GptOss", **sizes)
        for layer in model.model.layers:  # type: ignore[union-attr]
            nn.init.normal_(layer.self_attn.sinks)
        return model

    return compared(build, batch_of())


def experts() -> Finding:
    sizes = {"num_local_experts": 4, "sliding_window": None}
    return compared(lambda: model_of("Mixtral", **sizes), batch_of())


# ---- batches -------------------------------------------------------------------------------------
def packed() -> Finding:
    """Documents of all lengths, whose positions start again, in a model with a window."""
    batch = batch_of()
    lengths = torch.tensor([[5, 20, 12], [1, 17, 19]])
    batch["position_ids"] = torch.stack(
        [torch.cat([torch.arange(n) for n in row]) for row in lengths.tolist()]
    )
    return compared(lambda: model_of("Mistral", sliding_window=7), batch)


def padded_left() -> Finding:
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :21], mask[1, :3] = 0, 0
    batch["labels"][mask == 0] = -100
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return compared(
        lambda: model_of("Llama"), {**batch, "attention_mask": mask, "position_ids": positions}
    )


def padded_right() -> Finding:
    """No mask is needed: what is padded is behind."""
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 9:], mask[1, 30:] = 0, 0
    batch["labels"][mask == 0] = -100
    batch["attention_mask"] = mask
    assert "attention_mask" not in mstpass.shard_sequence(batch)
    return compared(lambda: model_of("Llama"), batch)


def few_labels() -> Finding:
    """The last token alone has a label, so that only one rank has any."""
    batch = batch_of(rows=1)
    batch["labels"][:, :-1] = -100
    return compared(lambda: model_of("Llama"), batch)


def no_labels() -> Finding:
    batch = batch_of(rows=1)
    batch["labels"][:] = -100
    return compared(lambda: model_of("Llama"), batch)


def embedded() -> Finding:
    """Embeddings in the place of ids."""
    batch = batch_of()
    torch.manual_seed(2)
    ids = batch.pop("input_ids")
    batch["inputs_embeds"] = torch.randn(*ids.shape, SIZES["hidden_size"])
    return compared(lambda: model_of("Llama"), batch)


def accumulated() -> Finding:
    """Two batches of different numbers of labels before the gradients are read."""
    first, second = batch_of(), batch_of(rows=1)
    second["labels"][:, :30] = -100
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in (first, second))
    return compared(lambda: model_of("Llama"), first, second, num_items_in_batch=count)
