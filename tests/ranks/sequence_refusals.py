"""What sequences on several ranks refuse: each error, by what it is about."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import mstpass
from tests.ranks.sequences import LENGTH, batch_of, mesh_of, model_of, one_head, refusal


def refusals() -> dict[str, str]:
    """What is refused, by what it is about."""
    share, shard = mstpass.sequence_parallel, mstpass.shard_sequence
    llama = share(model_of("Llama"))
    part = shard(batch_of())
    mine = {**batch_of(), "labels": batch_of()["labels"][:, dist.get_rank() :]}
    mine["input_ids"] = mine["input_ids"][:, dist.get_rank() :]
    q = torch.randn(1, 3, 4, 8)
    window = model_of("Mistral", sliding_window=7)
    ring_model = share(model_of("Llama"), method="ring")
    packed = {**batch_of(), "position_ids": torch.arange(LENGTH)[None] % 9}
    attend = mstpass.sequence_parallel_attention
    left = batch_of()
    left["input_ids"][0, :3], left["labels"][0, :3] = 0, -100
    classifier = model_of("Llama SequenceClassification")
    calls: dict[str, Callable[[], object]] = {
        "no transformers": lambda: share(nn.Linear(2, 2)),
        "heads": lambda: share(one_head(), method="ulysses"),
        "method": lambda: share(model_of("Llama"), method="rings"),  # type: ignore[arg-type]
        "groups": lambda: share(model_of("Llama"), head_groups=4),
        "number of groups": lambda: share(model_of("Llama"), head_groups=0),
        "groups in a ring": lambda: share(model_of("Llama"), method="ring", head_groups=2),
        "method of a mesh": lambda: share(model_of("Llama"), mesh_of(2), method="ring"),
        "heads of a mesh": lambda: share(one_head(), mesh_of(1)),
        "window in a mesh": lambda: share(window, mesh_of(2)),
        "window in a ring": lambda: share(window, method="ring"),
        "group": lambda: share(model_of("Llama"), 2),  # type: ignore[arg-type]
        "documents in a ring": lambda: ring_model(**shard(packed)),
        "loss of a sequence": lambda: share(classifier),
        "attention": lambda: share(model_of("Bloom")),
        "layer types": lambda: share(model_of("Lfm2", layer_types=["conv", "full_attention"])),
        "cache": lambda: llama(**part, use_cache=True),
        "mask of a part": lambda: llama(**part, attention_mask=part["input_ids"] > 0),
        "batch of a part": lambda: llama(
            **{name: part[name] for name in ("input_ids", "position_ids", "labels")}
        ),
        "tokens alone": lambda: llama(input_ids=part["input_ids"]),
        "padding on the left": lambda: shard(left),
        "labels of other tokens": lambda: shard(
            {**batch_of(), "labels": batch_of()["labels"][:, 1:]}
        ),
        "a tensor": lambda: shard(batch_of()["input_ids"]),  # type: ignore[arg-type]
        "other batches": lambda: shard(mine),
        "mask of four dims": lambda: shard(
            {**batch_of(), "attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}
        ),
        "positions of three dims": lambda: shard(
            {**batch_of(), "position_ids": torch.zeros(3, 2, LENGTH)}
        ),
        "nothing": lambda: shard({"labels": batch_of()["labels"]}),
        "gradients": lambda: shard(batch_of(), gradients="max"),  # type: ignore[arg-type]
        "key-value heads": lambda: attend(q, q[:, :2], q[:, :2]),
        "lengths": lambda: attend(q, q[:, :, :2], q[:, :, :2]),
        "dims": lambda: attend(q[0], q[0], q[0]),
        "documents": lambda: attend(q, q, q, method="ring", documents=torch.ones(1, 3)),
    }
    return {about: refusal(call) for about, call in calls.items()}
