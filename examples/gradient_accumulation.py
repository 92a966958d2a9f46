"""Gradient accumulation over micro-batches with different numbers of labels, and what goes with it.

The gradients of a step are those of the mean over all labels of its micro-batches. So each
micro-batch computes a sum, divided by the number of labels of the whole step. That number goes into
the compiled function as a tensor: a Python number would be part of the graph, which would then be
compiled again for the next number.

Scaling by a `GradScaler`, clipping, a fused optimizer and an average of the weights (EMA) stay
outside of the compiled function, as with any other backend.

    python examples/gradient_accumulation.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mstpass

VOCABULARY, WIDTH, BATCH, LENGTH, PARTS = 8192, 64, 4, 256, 3
IGNORED = -100


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor, num_items: Tensor) -> Tensor:
        logits_BSV = self.head(self.norm(torch.tanh(self.embed(ids_BS))))
        flat = logits_BSV.flatten(0, 1), labels_BS.flatten()
        return F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum") / num_items


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences of different lengths, padded on the left; each token's label is the next id."""
    torch.manual_seed(step)
    batches = []
    for _ in range(PARTS):
        ids_BS = torch.randint(VOCABULARY, (BATCH, LENGTH))
        labels_BS = ids_BS.roll(-1, 1)
        labels_BS[:, -1] = IGNORED
        first_B1 = torch.randint(LENGTH // 2, (BATCH, 1))
        labels_BS[torch.arange(LENGTH) < first_B1] = IGNORED
        batches.append((ids_BS, labels_BS))
    return batches


def train(backend: str, steps: int = 3) -> list[Tensor]:
    """The weights after some steps, and their averages (EMA)."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model()
    loss_of = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(steps):
        batches = micro_batches(step)
        num_items = sum((labels != IGNORED).sum() for _, labels in batches)
        for ids_BS, labels_BS in batches:
            scaler.scale(loss_of(ids_BS, labels_BS, num_items)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return [*model.parameters(), *averaged.module.parameters()]


def main() -> tuple[float, int]:
    right = train("eager")
    before = len(mstpass.reports())
    found = train("mst")
    compiled = len(mstpass.reports()) - before
    pairs = zip(found, right, strict=True)
    error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    print(mstpass.reports()[-1])
    print(f"graphs compiled: {compiled}")
    print(f"largest relative difference of a weight to eager's: {error:.1e}")
    return error, compiled


if __name__ == "__main__":
    main()
