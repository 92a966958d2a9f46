"""Tiny models and batches whose sequences ranks share, and their gradients against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import mstpass
from mstpass.backend import mst

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
    model = getattr(transformers, f"AutoModelFor{task or 'CausalLM'}").from_config(config)
    model.set_attn_implementation("eager")
    return model.train()


def batch_of(rows: int = 2, length: int = LENGTH) -> Batch:
    """Ids and labels. The first third has no labels, so that ranks have unequal numbers."""
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def right_of(model: nn.Module, *batches: Batch, causal: bool = True) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one process, over several batches as if they were one."""
    counts = [(batch["labels"][:, int(causal) :] != -100).sum() for batch in batches]
    count = torch.stack(counts).sum().clamp(min=1)
    loss = torch.zeros(())
    for batch in batches:
        without = {"use_cache": False} if causal else {}
        own = model(**batch, num_items_in_batch=count, **without).loss
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
    head_groups: int = 1,
    compiled: bool = True,
    **how: Any,
) -> Finding:
    """The error against one process, and how many graphs there are.

    Args:
        compiled: whether mst compiles the model; not in cases that are about the batch alone.
    """
    loss, right = right_of(model(), *batches, causal=how.get("causal", True))
    shared = mstpass.sequence_parallel(model(), group, method, head_groups)
    fn = torch.compile(shared, backend=mst, fullgraph=True) if compiled else shared
    before = len(mstpass.reports())
    found = 0.0
    for batch in batches:
        part = mstpass.shard_sequence(batch, group, gradients="sum", **how)
        value = fn(**part).loss
        value.backward()
        found += float(value.detach())
    total = added([torch.tensor(found, dtype=torch.float64)])[0]
    return {
        "error": errors(added(gradients(shared)), right),
        "loss": abs(float(total) - loss) / max(loss, 1e-9),
        "graphs": len(mstpass.reports()) - before if compiled else 1,
    }


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def one_layer(name: str, **changes: Any) -> nn.Module:
    return model_of(name, num_hidden_layers=1, **changes)


def one_head() -> nn.Module:
    return model_of("Llama", num_attention_heads=1, num_key_value_heads=1)


def mesh_of(rows: int) -> Any:
    """All ranks in so many rows."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("ring", "heads")
    return init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=names)
