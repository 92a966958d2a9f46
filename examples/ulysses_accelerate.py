"""One long sequence on several ranks, in a loop of Accelerate's with gradient accumulation.

Give `prepare` no data loader, so that all ranks read the same rows. Accelerate wraps the model in
DDP, which takes the mean of the ranks' gradients, and divides each loss by the number of
micro-batches, so that the loop multiplies it by that number: labels are counted over all of them.

    torchrun --standalone --nproc-per-node 2 examples/ulysses_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass


def main() -> list[float]:
    options = {"logits": "drop", "memory_budget": 0.0}
    dynamo = TorchDynamoPlugin(backend="mst", options=options)
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_cpu, dynamo_plugin=dynamo, gradient_accumulation_steps=2)
    torch.manual_seed(0)  # the same weights, and the same rows, on every rank
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=2, **sizes))
    mstpass.sequence_parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = torch.randint(4096, (6, 1, 1021))  # or a data loader
    model, optimizer = accelerator.prepare(model, optimizer)
    micro_batches = accelerator.gradient_accumulation_steps
    losses, loss_of_step = [], 0.0
    for ids in batches:
        batch = {"input_ids": ids, "labels": ids}
        count = micro_batches * (ids.shape[1] - 1)  # labels of all micro-batches
        part = mstpass.shard_sequence(batch, num_items_in_batch=torch.tensor(count))
        with accelerator.accumulate(model):  # DDP sums gradients up at the last one
            loss = model(**part).loss
            accelerator.backward(loss * micro_batches)
            optimizer.step()
            optimizer.zero_grad()
        loss_of_step += accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.sync_gradients:
            losses.append(loss_of_step)
            loss_of_step = 0.0
    accelerator.print(f"tokens of a rank: {part['input_ids'].shape[1]}, losses: {losses}")
    accelerator.print(mstpass.reports()[-1])
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
