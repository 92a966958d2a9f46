"""Checkpointed models for the linter's tests, and readers of its reports."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, INNER = 4, 8, 16
MM = 2 * TOKENS * WIDTH * INNER  # flops of one product of a block
REENTRANT, NON_REENTRANT = True, False


class Block(nn.Module):
    """``up`` is recomputed for gelu's gradient; the result of ``down`` is never read."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Blocks, each inside of the given checkpoints, the innermost first."""

    def __init__(self, *styles, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.styles = styles

    def forward(self, x):
        for layer in self.layers:
            run = layer
            for reentrant in self.styles:
                run = functools.partial(checkpoint, run, use_reentrant=reentrant)
            x = run(x)
        return x.square().mean()


def tokens():
    return torch.randn(TOKENS, WIDTH, requires_grad=True)


def by_kind(report, kind):
    return {f.module: f for f in report.findings if f.kind == kind}


def runs(report):
    return {m.module: (m.forward_runs, m.recompute_runs) for m in report.modules}
