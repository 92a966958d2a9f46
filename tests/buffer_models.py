"""Models that write to buffers or to inputs, as those of users do; each has MLPs and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import MLPS

D, VOCABULARY = 16, 128


class Model(nn.Module):
    """``forward(x_ND, labels_N)`` returns the loss."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers))
        self.mlps = nn.ModuleList(MLPS["gelu"](D) for _ in range(layers))
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def block(self, i: int, x_ND: Tensor) -> Tensor:
        return x_ND + self.mlps[i](self.norms[i](x_ND))

    def hidden(self, x_ND: Tensor) -> Tensor:
        for i in range(len(self.mlps)):
            x_ND = self.block(i, x_ND)
        return x_ND

    def loss(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x_ND), labels)

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.hidden(x_ND), labels)


class Counter(Model):
    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        x_ND = self.hidden(x_ND)
        self.seen.add_(1)
        return self.loss(x_ND, labels)


class DropoutAndCounter(Counter):
    def block(self, i: int, x_ND: Tensor) -> Tensor:
        return F.dropout(super().block(i, x_ND), 0.1)


class RunningStatistics(Model):
    """A convolution and BatchNorm before the MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(D, D, 3, padding=1, bias=False), nn.BatchNorm1d(D)

    def hidden(self, x_ND: Tensor) -> Tensor:
        x_BDS = x_ND.view(2, -1, D).transpose(1, 2)
        x_ND = self.norm(self.convolution(x_BDS)).transpose(1, 2).reshape(-1, D)
        return super().hidden(x_ND)


class MovingAverage(Model):
    """Of the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(VOCABULARY, D))

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.head.weight, 0.1)
        return super().forward(x_ND, labels)


class Center(Model):
    """Self-distillation: the teacher's outputs are centered by their moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(D, VOCABULARY, bias=False).requires_grad_(False)
        self.register_buffer("center", torch.zeros(VOCABULARY))

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        x_ND = self.hidden(x_ND)
        with torch.no_grad():
            taught = self.teacher(x_ND)
            wanted = ((taught - self.center) / 0.1).softmax(-1)
        loss = -(wanted * self.head(x_ND).log_softmax(-1)).sum(-1).mean()
        with torch.no_grad():
            self.center.mul_(0.9).add_(taught.mean(0), alpha=0.1)
        return loss


class RouterBias(Model):
    """A router that balances its experts by a bias, as DeepSeek-V3 does, and counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 8, bias=False)
        self.register_buffer("bias", torch.zeros(8))
        self.register_buffer("tokens", torch.zeros(8))

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        x_ND = self.hidden(x_ND)
        scores = self.gate(x_ND).sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        with torch.no_grad():
            counts = F.one_hot(chosen, 8).sum((0, 1)).float()
            self.tokens.add_(counts)
            self.bias.add_(torch.sign(counts.mean() - counts), alpha=0.001)
        return self.loss(x_ND * scores.gather(-1, chosen).sum(-1, keepdim=True), labels)


class Temperature(Model):
    """The head's loop reads a buffer that the step has written; and before, with ``old``."""

    def __init__(self, old: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((VOCABULARY,), 1.5))
        self.old = old

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(x_ND))
        if self.old:
            loss = F.cross_entropy(logits * self.scale.clone(), labels)
            self.scale.mul_(0.9)
            return loss
        return F.cross_entropy(logits * self.scale.mul_(0.9), labels)


class InCheckpoints(Model):
    """Each checkpointed block writes to a buffer that the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(D))

    def block(self, i: int, x_ND: Tensor) -> Tensor:
        def run(x_ND: Tensor) -> Tensor:
            y_ND = Model.block(self, i, x_ND) * self.largest.clone()
            with torch.no_grad():
                self.largest.copy_(y_ND.abs().amax(0).clamp(0.5, 1.0))
            return y_ND

        checkpointed: Tensor = checkpoint(run, x_ND, use_reentrant=False)
        return checkpointed


class WrittenInput(Model):
    """The third input is read, in forward and backward, and then written."""

    def forward(self, x_ND: Tensor, labels: Tensor, memory_ND: Tensor | None = None) -> Tensor:
        assert memory_ND is not None
        h_ND = self.hidden(x_ND + memory_ND.sin())
        loss = self.loss(h_ND * memory_ND.cos(), labels)
        with torch.no_grad():
            memory_ND.copy_(h_ND * 0.5)
        return loss


class CountedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        ctx.seen.add_(1)
        return gradient * x.cos(), None


class BackwardCounter(Counter):
    """The counter is written by the backward."""

    def forward(self, x_ND: Tensor, labels: Tensor) -> Tensor:
        return self.loss(CountedInBackward.apply(self.hidden(x_ND), self.seen), labels)


class LargestGradient(torch.autograd.Function):
    """The identity, whose backward keeps the largest gradient in a tensor."""

    @staticmethod
    def forward(ctx, x, largest):  # type: ignore[no-untyped-def]
        ctx.largest = largest
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.largest.copy_(torch.maximum(ctx.largest, gradient.amax()))
        return gradient, None
