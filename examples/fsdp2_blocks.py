"""FSDP2 with blocks compiled one by one, and the head with its loss as a unit of its own.

Large models are compiled block by block, since equal blocks then compile once. What is left is the
embedding, the head and the loss. ``HeadAndLoss`` holds norm, head and loss in one module, so that
one graph has the logits and their loss. FSDP2 wraps this module too: its weights are gathered when
it runs. With ``reshard_after_forward=False`` they are gathered once a step: its backward, which mst
has computed in the forward, needs only to scale the gradients.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_blocks.py

Gradients and the peak of a step are compared with eager's.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mstpass
from mstpass.measure import peak_bytes

WIDTH, VOCABULARY, TOKENS = 128, 8000, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD = self.norm(x_BSD)
        return x_BSD + self.down(F.silu(self.gate(h_BSD)) * self.up(h_BSD))


class HeadAndLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = self.head(self.norm(x_BSD))
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head_and_loss = HeadAndLoss()

    def forward(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSD = self.embed(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head_and_loss(x_BSD, labels_BS)


def gradients_and_peak(backend: str, ids_BS: Tensor) -> tuple[list[Tensor], int]:
    """This rank's shards of the gradients, and the peak bytes of a step after the first."""
    torch.compiler.reset()
    torch.manual_seed(0)  # the same weights on every rank
    model = Model()
    for module in (*model.blocks, model.head_and_loss):
        module.compile(backend=backend)
        fully_shard(module, reshard_after_forward=module is not model.head_and_loss)
    fully_shard(model)

    def step() -> None:
        model.zero_grad()
        model(ids_BS[:, :-1], ids_BS[:, 1:]).backward()

    step()  # compiles
    peak = peak_bytes(step)
    gradients = (parameter.grad for parameter in model.parameters())
    return [grad.to_local() for grad in gradients if isinstance(grad, DTensor)], peak


def main() -> tuple[float, dict[str, int]]:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every rank has a batch of its own
    ids_BS = torch.randint(VOCABULARY, (1, TOKENS + 1))
    right, eager_peak = gradients_and_peak("eager", ids_BS)
    found, peak = gradients_and_peak("mst", ids_BS)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
    if dist.get_rank() == 0:
        print(*mstpass.reports(), sep="\n")
        print(f"peak: eager {eager_peak / 2**20:.1f} MiB, mst {peak / 2**20:.1f} MiB")
        print(f"largest relative difference of a gradient to eager's: {error:.1e}")
    dist.destroy_process_group()
    return error, {"eager": eager_peak, "mst": peak}


if __name__ == "__main__":
    main()
