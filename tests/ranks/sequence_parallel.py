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
from torch import Tensor, nn

import mstpass
from mstpass.backend import mst
from mstpass.sequences.rules import Rules, attend
from tests.ranks.sequence_refusals import refusals as refusals
from tests.ranks.sequences import (
    LENGTH,
    SIZES,
    VOCABULARY,
    Batch,
    Finding,
    added,
    batch_of,
    compared,
    errors,
    gradients,
    mesh_of,
    model_of,
    one_head,
    one_layer,
    refusal,
    right_of,
)


# ---- models --------------------------------------------------------------------------------------
def llama() -> Finding:
    return compared(lambda: model_of("Llama"), batch_of())


def one_key_value_head() -> Finding:
    return compared(lambda: model_of("Llama", num_key_value_heads=1), batch_of(), compiled=False)


def odd_key_value_heads() -> Finding:
    """Three key-value heads of six: two ranks have one and a half each."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    return compared(lambda: model_of("Llama", **sizes), batch_of(), compiled=False)


def all_heads() -> Finding:
    return compared(lambda: model_of("Llama", num_key_value_heads=4), batch_of(), compiled=False)


def groups_of_heads() -> Finding:
    """Two groups of four heads: each has one of the two key-value heads, and both ranks need it."""
    return compared(lambda: one_layer("Llama"), batch_of(), head_groups=2)


def groups_of_odd_heads() -> Finding:
    """Twelve heads in two groups, of which each needs one and a half key-value heads of three."""
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
    return compared(lambda: model_of("Llama", **sizes), batch_of(), head_groups=2, compiled=False)


def groups_that_share_a_head() -> Finding:
    """One key-value head for all groups."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    return compared(lambda: model_of("Llama", **sizes), batch_of(), head_groups=4, compiled=False)


def groups_with_sinks() -> Finding:
    """Each head keeps its own sink."""
    q, k, v = (torch.randn(2, heads, 12, 8, requires_grad=True) for heads in (8, 4, 4))
    sinks = torch.randn(8, requires_grad=True)
    right = attend(q, k, v, Rules(sinks_H=sinks))
    right.sin().sum().backward()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = [x.detach().chunk(ranks, 2)[rank].clone().requires_grad_() for x in (q, k, v)]
    own = sinks.detach().clone().requires_grad_()
    found = mstpass.sequence_parallel_attention(*parts, is_causal=True, sinks=own, head_groups=2)
    found.sin().sum().backward()
    pairs = [(found, right), *((a.grad, b.grad) for a, b in zip(parts, (q, k, v), strict=True))]
    error = errors(added([own.grad]), [sinks.grad])  # type: ignore[list-item]
    for a, b in pairs:
        assert a is not None and b is not None
        error = max(error, errors([a.detach()], [b.detach().chunk(ranks, 2)[rank]]))
    return {"error": error}


def learned_positions() -> Finding:
    sizes = {"n_positions": LENGTH + 3, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return compared(lambda: model_of("GPT2", **sizes), batch_of(), compiled=False)


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
    return compared(lambda: model_of("Mixtral", **sizes), batch_of(), compiled=False)


def latent() -> Finding:
    """Multi-head latent attention, whose values have fewer features than its keys."""
    q, k, v = (torch.randn(2, 4, 12, D, requires_grad=True) for D in (12, 12, 8))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    right.sin().sum().backward()
    ranks, rank, error = dist.get_world_size(), dist.get_rank(), 0.0
    for method in ("ulysses", "ring"):
        parts = [x.detach().chunk(ranks, 2)[rank].clone().requires_grad_() for x in (q, k, v)]
        fn = torch.compile(mstpass.sequence_parallel_attention, backend=mst, fullgraph=True)
        found = fn(*parts, is_causal=True, method=method)
        found.sin().sum().backward()
        pairs = [(found, right), *((a.grad, b.grad) for a, b in zip(parts, (q, k, v), strict=True))]
        for a, b in pairs:
            assert a is not None and b is not None
            error = max(error, errors([a.detach()], [b.detach().chunk(ranks, 2)[rank]]))
    return {"error": error}


def checkpointed() -> Finding:
    """Hugging Face's checkpoints of each block, whose exchanges run again in backward."""

    def build() -> nn.Module:
        model: Any = model_of("Llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return compared(build, batch_of())


# ---- batches -------------------------------------------------------------------------------------
def packed() -> Finding:
    """Documents of all lengths, whose positions start again, in a model with a window."""
    return compared(lambda: one_layer("Mistral", sliding_window=7), _of_documents())


def groups_of_documents() -> Finding:
    """The same in groups of heads."""
    return compared(lambda: model_of("Mistral", sliding_window=7), _of_documents(), head_groups=2)


def groups_with_dropout() -> Finding:
    """All is dropped, and all gradients are 0."""
    parts = [torch.randn(2, 4, 12, 8, requires_grad=True) for _ in range(3)]
    how = {"is_causal": True, "dropout_p": 1.0, "head_groups": 2}
    found = mstpass.sequence_parallel_attention(*parts, **how)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(found.sum(), parts)
    return {"error": float(sum(x.abs().sum() for x in (found, *gradients)))}


def _of_documents() -> Batch:
    rows = [[5, 20, 12], [1, 17, 19]]
    places = [torch.cat([torch.arange(n) for n in row]) for row in rows]
    return {**batch_of(), "position_ids": torch.stack(places)}


def padded_left() -> Finding:
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :21], mask[1, :3] = 0, 0
    batch["labels"][:, :22] = -100  # padding predicts nothing
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return compared(
        lambda: model_of("Llama"),
        {**batch, "attention_mask": mask, "position_ids": positions},
        compiled=False,
    )


def padded_right() -> Finding:
    """No mask is needed: what is padded is behind."""
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 9:], mask[1, 30:] = 0, 0
    batch["labels"][mask == 0] = -100
    batch["attention_mask"] = mask
    assert "attention_mask" not in mstpass.shard_sequence(batch)
    return compared(lambda: model_of("Llama"), batch, compiled=False)


def few_labels() -> Finding:
    """The last token alone has a label, so that only one rank has any."""
    batch = batch_of(rows=1)
    batch["labels"][:, :-1] = -100
    return compared(lambda: model_of("Llama"), batch, compiled=False)


def no_labels() -> Finding:
    batch = batch_of(rows=1)
    batch["labels"][:] = -100
    return compared(lambda: model_of("Llama"), batch, compiled=False)


def embedded() -> Finding:
    """Embeddings in the place of ids."""
    batch = batch_of()
    torch.manual_seed(2)
    ids = batch.pop("input_ids")
    batch["inputs_embeds"] = torch.randn(*ids.shape, SIZES["hidden_size"])
    return compared(lambda: model_of("Llama"), batch, compiled=False)


def accumulated() -> Finding:
    """Two batches of different numbers of labels before the gradients are read."""
    first, second = batch_of(), batch_of()
    second["labels"][:, :30] = -100
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in (first, second))
    return compared(
        lambda: model_of("Llama"), first, second, num_items_in_batch=count, compiled=False
    )


# ---- encoders ------------------------------------------------------------------------------------
def _masked_words() -> Batch:
    """A batch with padding, whose labels are those of a seventh of the tokens, not shifted."""
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 30:], mask[1, 9:] = 0, 0
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 1:30:7] = batch["input_ids"][:, 1:30:7]
    labels[mask == 0] = -100
    return {**batch, "labels": labels, "attention_mask": mask}


def encoder() -> Finding:
    """Full attention, and windows in both directions."""
    sizes = {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}
    dropless = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0}
    build = lambda: model_of("ModernBert MaskedLM", **sizes, **dropless)
    found = compared(build, _masked_words(), causal=False)
    whole = _masked_words()
    del whole["attention_mask"]
    unpadded = compared(build, whole, causal=False, compiled=False)
    return {**found, "error": max(found["error"], unpadded["error"])}


def encoder_with_own_loss() -> Finding:
    """BERT's loss is a mean that knows no number of labels: it is computed outside."""
    dropless = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    batch = _masked_words()

    def step(model: nn.Module, batch: Batch) -> list[Tensor]:
        labels, count = batch["labels"], batch["num_items_in_batch"]
        inputs = {k: x for k, x in batch.items() if k not in ("labels", "num_items_in_batch")}
        logits = model(**inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        return gradients(model)

    count = (batch["labels"] != -100).sum()
    right = step(model_of("Bert MaskedLM", **dropless), {**batch, "num_items_in_batch": count})
    shared = mstpass.sequence_parallel(model_of("Bert MaskedLM", **dropless))
    part = mstpass.shard_sequence(batch, gradients="sum", causal=False)
    refused = refusal(lambda: shared(**part))
    return {"error": errors(added(step(shared, part)), right), "refused": refused}


# ---- plain PyTorch, wrappers ---------------------------------------------------------------------
class Plain(nn.Module):
    """A model of one's own: attention to all heads, head and loss."""

    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY)
        self.attend = attend

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def _plain(method: str) -> Finding:
    batch = batch_of()
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    whole = Plain(F.scaled_dot_product_attention)
    places = torch.arange(LENGTH).expand_as(batch["input_ids"])
    count = (labels != -100).sum()
    (whole(batch["input_ids"], places, labels) / count).backward()

    def attend(*args: Tensor, **kwargs: Any) -> Tensor:
        return mstpass.sequence_parallel_attention(*args, **kwargs, method=method)  # type: ignore[arg-type]

    model = Plain(attend)
    part = mstpass.shard_sequence(batch, gradients="sum")
    fn = torch.compile(model, backend=mst, fullgraph=True)
    loss = fn(part["input_ids"], part["position_ids"], part["shift_labels"])
    (loss / part["num_items_in_batch"]).backward()
    return {"error": errors(added(gradients(model)), gradients(whole))}


def plain() -> Finding:
    return _plain("ulysses")


def plain_ring() -> Finding:
    return _plain("ring")


def ring() -> Finding:
    return compared(lambda: one_layer("Llama"), batch_of(), method="ring")


def ring_of_rows() -> Finding:
    """Two rows of two ranks: each row exchanges its heads, and the rows are a ring."""
    return compared(lambda: model_of("Llama"), batch_of(), group=mesh_of(2))


def ring_of_rows_in_groups() -> Finding:
    """The same with groups of heads, and a number of tokens that four ranks do not divide."""
    build = lambda: model_of("Llama", num_key_value_heads=4)
    return compared(build, batch_of(), group=mesh_of(2), head_groups=2, compiled=False)


def more_ranks_than_heads() -> Finding:
    return compared(one_head, batch_of())


def ring_of_encoder() -> Finding:
    """Full attention of all tokens, whose number the ranks divide."""
    dropless = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0}
    batch = batch_of(length=36)
    return compared(
        lambda: model_of("ModernBert MaskedLM", layer_types=["full_attention"] * 2, **dropless),
        batch,
        causal=False,
        method="ring",
    )


def fully_sharded() -> Finding:
    """FSDP2 around each block, whose gradients are means over the ranks; an example compiles it."""
    from torch.distributed.fsdp import fully_shard

    _, right = right_of(model_of("Llama"), batch_of())
    shared: Any = mstpass.sequence_parallel(model_of("Llama"))
    for layer in shared.model.layers:
        fully_shard(layer)
    fully_shard(shared)
    shared(**mstpass.shard_sequence(batch_of())).loss.backward()
    found = [p.grad.full_tensor() for p in shared.parameters()]
    return {"error": errors(found, right)}


def of_a_mesh() -> Finding:
    """Two sequences, each of a half of the ranks: labels are counted over all of them."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "sequence"))
    rows = batch_of()
    _, right = right_of(model_of("Llama"), rows)
    shared = mstpass.sequence_parallel(model_of("Llama"), mesh["sequence"])
    own = mesh.get_local_rank("data")
    row = {name: value[own : own + 1] for name, value in rows.items()}
    worst = 0.0
    for data in (mesh["data"], dist.group.WORLD):
        shared.zero_grad()
        part = mstpass.shard_sequence(row, mesh["sequence"], data, gradients="mean")
        shared(**part).loss.backward()
        mean = [gradient / ranks for gradient in added(gradients(shared))]
        worst = max(worst, errors(mean, right))
    return {"error": worst}
