"""One long sequence on several ranks, whose weights FSDP2 shards over the same ranks.

FSDP2 takes the mean of the ranks' gradients, which `shard_sequence` expects unless it is told
otherwise. With data parallel ranks beside those of a sequence, take a mesh of both::

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "sequence"))
    sequence_parallel(model, mesh["sequence"]); fully_shard(model, mesh=...)  # of all eight
    shard_sequence(batch, mesh["sequence"], mesh["data"])

    torchrun --standalone --nproc-per-node 2 examples/ulysses_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass


def main() -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights, and the same batch, on every rank
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=2, **sizes))
    mstpass.sequence_parallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    mstpass.compile(model, memory_budget=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(4096, (1, 1021))
    part = mstpass.shard_sequence({"input_ids": ids, "labels": ids})
    losses = []
    for _ in range(3):
        loss = model(**part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    if dist.get_rank() == 0:
        print(f"tokens of a rank: {part['input_ids'].shape[1]}, losses: {losses}")
        print(mstpass.reports()[-1])
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
