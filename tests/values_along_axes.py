"""Models in which two readers of one value need it along different dims, or along none that a loop
could cut; and a recursion over time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, VOCAB = 32, 800


class TwoLayers(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class PairSum(nn.Module):
    """A value of pairs, and its transpose, as heads over distances have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out, self.mlp = nn.Linear(8, D), nn.Linear(D, 40), TwoLayers(D)
        self.relative = nn.Embedding(9, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        place = torch.arange(len(x))
        apart = (place[:, None] - place[None]).clamp(-4, 4) + 4
        z = self.mlp(self.embed(x)[:, None] + self.relative(apart))
        return F.cross_entropy(self.out(z + z.transpose(0, 1)).flatten(0, 1), y.flatten())

    @staticmethod
    def inputs() -> list[Tensor]:
        return [torch.randn(24, 8), torch.randint(40, (24, 24))]


class MixtureOfSoftmaxes(nn.Module):
    """The gradient of a sum over the softmaxes is expanded to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(VOCAB, D), TwoLayers(D)
        self.prior, self.latent = nn.Linear(D, 3, bias=False), nn.Linear(D, 3 * D)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        h = self.mlp(self.embed(ids)).flatten(0, 1)
        weights = self.prior(h).softmax(-1)[..., None]
        logits = F.linear(torch.tanh(self.latent(h)).view(-1, D), self.embed.weight)
        mixed = (logits.softmax(-1).view(len(h), 3, -1) * weights).sum(1)
        return F.nll_loss((mixed + 1e-6).log(), y.flatten())

    @staticmethod
    def inputs() -> list[Tensor]:
        return [torch.randint(VOCAB, (2, 128)) for _ in range(2)]


class _Mixer(nn.Module):
    def __init__(self, heads: int = 2, chunk: int = 16) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.rates = nn.Linear(D, 2 * heads)

    def forward(self, x: Tensor) -> Tensor:
        (b, t, _), h, c = x.shape, self.heads, self.chunk
        apart = lambda v: v.view(b, t // c, c, h, -1).permute(0, 3, 1, 2, 4)
        q, k, v = map(apart, self.qkv(x).chunk(3, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        decay, beta = self.rates(x).chunk(2, -1)
        beta = apart(beta.sigmoid())
        total = apart(-F.softplus(decay)).squeeze(-1).cumsum(-1)
        low = torch.tril(torch.ones(c, c, dtype=torch.bool))
        between = (total[..., :, None] - total[..., None, :]).masked_fill(~low, -1e9).exp()
        eye = torch.eye(c, dtype=x.dtype)
        mixed = ((k * beta) @ k.transpose(-1, -2)) * between * torch.tril(low, -1).to(x.dtype)
        solved = torch.linalg.solve_triangular(
            eye + mixed, eye.expand_as(mixed), upper=False, unitriangular=True
        )
        values, keys = solved @ (v * beta), solved @ (k * beta * total.exp()[..., None])
        state, outs = x.new_zeros(b, h, D // h, D // h), []
        for i in range(t // c):
            qi, ki, ti = q[:, :, i], k[:, :, i], total[:, :, i]
            new = values[:, :, i] - keys[:, :, i] @ state
            seen = (qi * ti.exp()[..., None]) @ state
            outs.append(seen + ((qi @ ki.transpose(-1, -2)) * between[:, :, i]) @ new)
            late = (ki * (ti[..., -1:] - ti).exp()[..., None]).transpose(-1, -2)
            state = state * ti[..., -1].exp()[..., None, None] + late @ new
        return self.out(torch.stack(outs, 2).permute(0, 2, 3, 1, 4).reshape(b, t, D))


class DeltaRule(nn.Module):
    """Linear attention in chunks: masks of chunks are read along queries and along keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(_Mixer(), TwoLayers(D)) for _ in range(2))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (D,)))
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    @staticmethod
    def inputs() -> list[Tensor]:
        return [torch.randint(VOCAB, (4, 64)) for _ in range(2)]


class Recursion(nn.Module):
    """The forward algorithm of a conditional random field, beside an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.emit = TwoLayers(D), nn.Linear(D, 48)
        self.move = nn.Parameter(torch.randn(48, 48) / 10)

    def forward(self, x: Tensor) -> Tensor:
        e = self.emit(self.mlp(x))
        a = e[:, 0]
        for t in range(1, x.shape[1]):
            a = torch.logsumexp(a[:, :, None] + self.move[None], 1) + e[:, t]
        return torch.logsumexp(a, 1).mean()

    @staticmethod
    def inputs(steps: int = 40) -> list[Tensor]:
        return [torch.randn(16, steps, D)]


MODELS = {  # the kinds of their regions
    PairSum: ["mlp"],
    MixtureOfSoftmaxes: ["mlp"],
    DeltaRule: ["lm_head", "mlp", "mlp"],
    Recursion: ["mlp"],
}
