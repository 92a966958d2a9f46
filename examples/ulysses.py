"""One long sequence on several ranks: a Hugging Face Llama whose code stays as it is.

Each rank has a part of the tokens. In attention it has all tokens of some heads (Ulysses). The
rest of the step works token by token, and mst runs it in chunks of the rank's tokens.

    torchrun --standalone --nproc-per-node 2 examples/ulysses.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass


def main() -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights, and the same batch, on every rank
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=2, **sizes))
    mstpass.compile(mstpass.sequence_parallel(model))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(4096, (1, 1021))
    part = mstpass.shard_sequence({"input_ids": ids, "labels": ids}, gradients="sum")
    losses = []
    for _ in range(3):
        loss = model(**part).loss  # this rank's share of it
        loss.backward()
        for value in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(value)  # DDP and FSDP2 do this for gradients
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"tokens of a rank: {part['input_ids'].shape[1]}, losses: {losses}")
        print(mstpass.reports()[-1])
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
