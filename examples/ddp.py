"""DDP around a Hugging Face Llama: the wrapped module returns its loss.

DDP's ``forward`` is not compiled, so a graph ends there. The module inside of DDP therefore
computes the loss and returns it alone. Then one graph holds the head together with its loss, and
mst computes the logits one chunk at a time. Where a bucket of gradients is full, Dynamo splits the
graph, so that DDP reduces the bucket while the backward goes on. Here ``bucket_cap_mb=1`` splits
the model.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

Gradients and the peak of a step are compared with eager's.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass
from mstpass.measure import peak_bytes

VOCABULARY, TOKENS = 8000, 2048


class ModelWithLoss(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.model(input_ids=ids_BS, labels=ids_BS).loss


def new_model() -> ModelWithLoss:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    return ModelWithLoss(LlamaForCausalLM(config))


def gradients_and_peak(backend: str, ids_BS: Tensor) -> tuple[list[Tensor], int]:
    """The gradients, which are the mean over the ranks, and the peak bytes of a later step."""
    torch.compiler.reset()
    model = DistributedDataParallel(new_model(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad()
        compiled(ids_BS).backward()

    for _ in range(2):  # the first step compiles; after it, DDP makes its buckets anew
        step()
    peak = peak_bytes(step)
    return [p.grad for p in model.parameters() if p.grad is not None], peak


def main() -> tuple[float, dict[str, int]]:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank has a batch of its own
    ids_BS = torch.randint(VOCABULARY, (1, TOKENS))
    right, eager_peak = gradients_and_peak("eager", ids_BS)
    found, peak = gradients_and_peak("mst", ids_BS)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
    if dist.get_rank() == 0:
        for report in mstpass.reports():  # one for each part of the split graph
            print(report)
        print(f"peak: eager {eager_peak / 2**20:.1f} MiB, mst {peak / 2**20:.1f} MiB")
        print(f"largest relative difference of a gradient to eager's: {error:.1e}")
    dist.destroy_process_group()
    return error, {"eager": eager_peak, "mst": peak}


if __name__ == "__main__":
    main()
