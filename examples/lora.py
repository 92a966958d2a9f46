"""LoRA on a frozen, quantized model: what is trained is small, so the logits are the step's peak.

The base weights are int8 with a scale for each row, as in QLoRA, and are dequantized in the
forward. Adapters with dropout are beside each layer of the MLP. mst takes the head with its loss;
frozen weights have no gradients, so the loop of the head computes none for them.

    python examples/lora.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.measure import peak_bytes

VOCABULARY, WIDTH, RANK, TOKENS = 8192, 128, 8, 2048


class Int8Linear(nn.Module):
    """A frozen linear layer whose weight is int8 times a scale for each row."""

    weight: Tensor  # (out, in)
    scale: Tensor  # (out, 1)

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        weight_OI = torch.randn(width_out, width_in) * width_in**-0.5
        scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight_OI / scale_O1).round().to(torch.int8))
        self.register_buffer("scale", scale_O1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class LoRALinear(nn.Module):
    """The frozen layer, and beside it a trained product of two narrow matrices."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.base, self.dropout = Int8Linear(width_in, width_out), nn.Dropout(0.05)
        self.down = nn.Linear(width_in, RANK, bias=False)
        self.up = nn.Linear(RANK, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = LoRALinear(WIDTH, 4 * WIDTH), LoRALinear(WIDTH, 4 * WIDTH)
        self.down, self.head = LoRALinear(4 * WIDTH, WIDTH), Int8Linear(WIDTH, VOCABULARY)

    def forward(self, ids_T: Tensor, labels_T: Tensor) -> Tensor:
        x_TD = self.embed(ids_T)
        h_TD = self.norm(x_TD)
        x_TD = x_TD + self.down(F.silu(self.gate(h_TD)) * self.up(h_TD))
        return F.cross_entropy(self.head(x_TD), labels_T)


def losses_and_peak(device: str) -> tuple[list[float], int]:
    """The losses of some steps of training, and the peak bytes of forward and backward."""
    torch.manual_seed(0)
    model = Model().to(device)
    step = torch.compile(model, backend="mst")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    ids_T, labels_T = torch.randint(VOCABULARY, (2, TOKENS)).to(device)
    losses = []
    for _ in range(6):
        loss = step(ids_T, labels_T)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, peak_bytes(lambda: step(ids_T, labels_T).backward())


def main() -> tuple[list[float], int, int]:
    losses, peak = losses_and_peak("cuda" if torch.cuda.is_available() else "cpu")
    logits_bytes = TOKENS * VOCABULARY * 4
    print(mstpass.reports()[-1])
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"peak: {peak / 2**20:.1f} MiB; logits in full: {logits_bytes / 2**20:.1f} MiB")
    return losses, peak, logits_bytes


if __name__ == "__main__":
    main()
