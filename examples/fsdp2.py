"""FSDP2 around a Hugging Face Llama: the head and its loss are one method of the wrapped module.

FSDP2 gathers each layer's weights in a hook, and a compiled graph ends at each hook. So there are
several graphs, and one of them should hold the head together with its loss: then mst computes the
logits one chunk at a time. The model's own ``forward`` returns its logits beside the loss, so that
they must exist in full. `ModelWithLoss` calls the layers, and then the head in a method that
returns the loss alone.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

Gradients are compared with eager's, the peak of a step with Inductor's.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass
from mstpass.measure import peak_bytes

VOCABULARY, TOKENS = 8000, 2048


class ModelWithLoss(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BS: Tensor) -> Tensor:
        hidden_BSD = self.model.model(input_ids=ids_BS).last_hidden_state
        return self.loss(hidden_BSD[:, :-1], ids_BS[:, 1:])

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = self.model.lm_head(hidden_BSD)
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


def sharded_model() -> ModelWithLoss:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)  # the same weights on every rank
    model = ModelWithLoss(LlamaForCausalLM(config))
    for layer in model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def gradients_and_peak(backend: str, ids_BS: Tensor) -> tuple[list[Tensor], int]:
    """This rank's shards of the gradients, and the peak bytes of a step after the first."""
    torch.compiler.reset()
    model = sharded_model()
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad()
        compiled(ids_BS).backward()

    step()  # compiles
    peak = peak_bytes(step)
    gradients = (parameter.grad for parameter in model.parameters())
    return [grad.to_local() for grad in gradients if isinstance(grad, DTensor)], peak


def main() -> tuple[float, dict[str, int]]:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank has a batch of its own
    ids_BS = torch.randint(VOCABULARY, (1, TOKENS))
    right, _ = gradients_and_peak("eager", ids_BS)
    _, inductor_peak = gradients_and_peak("inductor", ids_BS)
    found, peak = gradients_and_peak("mst", ids_BS)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
    if dist.get_rank() == 0:
        print(next(report for report in mstpass.reports() if report.regions))
        print(f"peak: Inductor {inductor_peak / 2**20:.1f} MiB, mst {peak / 2**20:.1f} MiB")
        print(f"largest relative difference of a gradient to eager's: {error:.1e}")
    dist.destroy_process_group()
    return error, {"inductor": inductor_peak, "mst": peak}


if __name__ == "__main__":
    main()
