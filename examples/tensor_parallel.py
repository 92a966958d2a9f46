"""A tensor-parallel model: sharded MLPs, and a head whose vocabulary is sharded over the ranks.

Each rank has a part of every MLP's features and a part of the head's vocabulary. Under
`loss_parallel` the ranks exchange three numbers for each token, never the logits. mst runs each
rank's share in chunks: of the MLPs' features, and of its columns of the logits. The logits are
computed twice, because the maximum and the sum over the whole vocabulary are known only after a
first loop; no loop holds a collective, so ranks need not have the same plan.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py

Gradients are compared with eager's, the peak of a step with Inductor's.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import mstpass
from mstpass.measure import peak_bytes

WIDTH, VOCABULARY, TOKENS = 128, 16_000, 1024


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x_ND: Tensor, labels_N: Tensor) -> Tensor:
        h_ND = x_ND + self.down(F.gelu(self.up(self.norm(x_ND))))
        loss = F.cross_entropy(self.head(h_ND), labels_N)
        return loss.to_local() if isinstance(loss, DTensor) else loss


def sharded_model(mesh: DeviceMesh) -> Model:
    torch.manual_seed(0)  # the same weights on every rank, before each takes its part
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    model = Model()
    parallelize_module(model, mesh, plan)
    return model


def gradients_and_peak(backend: str, mesh: DeviceMesh) -> tuple[list[Tensor], int]:
    """This rank's shards of the gradients, and the peak bytes of a step after the first."""
    torch.compiler.reset()
    model = sharded_model(mesh)
    compiled = torch.compile(model, backend=backend)
    torch.manual_seed(1)
    x_ND, labels_N = torch.randn(TOKENS, WIDTH), torch.randint(VOCABULARY, (TOKENS,))

    def step() -> None:
        model.zero_grad()
        with loss_parallel():
            compiled(x_ND, labels_N).backward()

    step()  # compiles
    peak = peak_bytes(step)
    grads = (parameter.grad for parameter in model.parameters())
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None], peak


def main() -> float:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    right, _ = gradients_and_peak("eager", mesh)
    _, inductor_peak = gradients_and_peak("inductor", mesh)
    found, peak = gradients_and_peak("mst", mesh)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))
    if dist.get_rank() == 0:
        print(mstpass.reports()[-1])
        print(f"peak: Inductor {inductor_peak / 2**20:.1f} MiB, mst {peak / 2**20:.1f} MiB")
        print(f"largest relative difference of a gradient to eager's: {error:.1e}")
    dist.destroy_process_group()
    return error


if __name__ == "__main__":
    main()
