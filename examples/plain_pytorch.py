"""Your own model in plain PyTorch: mst looks at what the graph computes, not at class names.

The loss and the gradients of one step are computed with eager and with mst, and compared.

    python examples/plain_pytorch.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass

VOCABULARY, WIDTH, MLP_WIDTH, TOKENS = 8192, 128, 512, 1000  # chunks need not divide 1000


class GatedBlock(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, MLP_WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        h_TD = self.norm(x_TD)
        return x_TD + self.down(F.silu(self.gate(h_TD)) * self.up(h_TD))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(GatedBlock(), GatedBlock())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_T: Tensor, labels_T: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(ids_T))), labels_T)


def loss_and_gradients(backend: str, device: str) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = Model().to(device)
    ids_T, labels_T = torch.randint(VOCABULARY, (2, TOKENS)).to(device)
    # compile the module itself, because its output is the loss
    loss = torch.compile(model, backend=backend)(ids_T, labels_T)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def main() -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager_loss, eager_gradients = loss_and_gradients("eager", device)
    loss, gradients = loss_and_gradients("mst", device)
    pairs = zip(gradients, eager_gradients, strict=True)
    error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    print(mstpass.reports()[-1])
    print(f"loss: eager {eager_loss:.6f}, mst {loss:.6f}")
    print(f"largest relative difference of a gradient to that of eager: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
