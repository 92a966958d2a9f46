"""Layers are checkpointed twice: the linter finds it, and says what to remove.

Each layer checkpoints itself, as Hugging Face's layers do after `gradient_checkpointing_enable()`.
A `checkpoint_wrapper` goes around each layer as well, as under FSDP's activation checkpointing. One
of the two is harmless. With both, the forward of each layer runs three times in a step.

    python examples/find_double_recompute.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import mstpass
from mstpass.measure import timed

WIDTH, INNER, TOKENS, DEPTH, ROUNDS = 256, 1024, 1024, 4, 5


class Layer(nn.Module):
    """A gated MLP that checkpoints itself while `checkpointing` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.checkpointing = True

    def forward(self, h_TD: Tensor) -> Tensor:
        if self.checkpointing:
            out_TD: Tensor = checkpoint(self.compute, h_TD, use_reentrant=True)
            return out_TD
        return self.compute(h_TD)

    def compute(self, h_TD: Tensor) -> Tensor:
        normed_TD = self.norm(h_TD)
        return h_TD + self.down(F.silu(self.gate(normed_TD)) * self.up(normed_TD))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(checkpoint_wrapper(Layer()) for _ in range(DEPTH))

    def forward(self, h_TD: Tensor) -> Tensor:
        for layer in self.layers:
            h_TD = layer(h_TD)
        return h_TD.square().mean()


def main() -> tuple[mstpass.LintReport, mstpass.LintReport, float]:
    torch.manual_seed(0)
    twice, once = Model(), Model()
    for module in once.modules():
        if isinstance(module, Layer):
            module.checkpointing = False  # as the linter advises: keep one of the two
    h_TD = torch.randn(TOKENS, WIDTH, requires_grad=True)

    before = mstpass.lint(twice, h_TD)
    print(before)
    after = mstpass.lint(once, h_TD)
    print(f"\nWith one of the two removed:\n{after}")

    times = timed(
        {"twice": lambda: twice(h_TD).backward(), "once": lambda: once(h_TD).backward()}, ROUNDS
    )
    ratio = times["twice"].ratio_to(times["once"])
    print(f"\nTime of a step, twice / once: {ratio:.2f}x (median of {ROUNDS} rounds)")
    print(f"Flops of a step, twice / once: {before.step_flops / after.step_flops:.2f}x")
    return before, after, ratio


if __name__ == "__main__":
    main()
