"""Hand-written tiling over the tokens, of MLPs and of the head, as in MST and ALST.

The forward of the MLP runs tile by tile without recording gradients, and saves only its input. Its
backward recomputes each tile, with gradients. The head computes loss and gradients of each tile in
the forward. (MST: arXiv 2407.15892. ALST: `TiledMLP` and `TiledFusedLogitsLoss`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function


def mlp(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """`module(x)`, computed in `chunks` tiles of the rows of x, one after the other."""
    return _TiledMLP.apply(module, x, chunks, *module.parameters())


def head_loss(x_ND: Tensor, w_VD: Tensor, target_N: Tensor, chunks: int) -> Tensor:
    """Mean cross-entropy of the logits `x @ w.T`, of which only one tile exists at a time."""
    return _TiledHeadLoss.apply(x_ND, w_VD, target_N, chunks)


class _TiledMLP(Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, chunks: int, *weights: Tensor) -> Tensor:
        ctx.module, ctx.chunks = module, chunks
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        for x_tile, y_tile in zip(_tiles(x, chunks), _tiles(y, chunks), strict=True):
            y_tile.copy_(module(x_tile))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x,), (grad_y,) = ctx.saved_tensors, grad_outputs
        weights = tuple(ctx.module.parameters())
        grads = [torch.zeros_like(weight) for weight in weights]
        grad_x = torch.empty_like(x)
        pieces = (_tiles(t, ctx.chunks) for t in (x, grad_y.contiguous(), grad_x))
        for x_tile, grad_y_tile, grad_x_tile in zip(*pieces, strict=True):
            x_leaf = x_tile.detach().requires_grad_()
            with torch.enable_grad():
                y_tile = ctx.module(x_leaf)
            found = torch.autograd.grad(y_tile, (x_leaf, *weights), grad_y_tile)
            grad_x_tile.copy_(found[0])
            for grad, more in zip(grads, found[1:], strict=True):
                grad += more
        return None, grad_x, None, *grads


class _TiledHeadLoss(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w_VD: Tensor, target_N: Tensor, chunks: int) -> Tensor:
        grad_x_ND, grad_w_VD = torch.empty_like(x_ND), torch.zeros_like(w_VD)
        total = x_ND.new_zeros(())
        pieces = (t.chunk(chunks) for t in (x_ND, target_N, grad_x_ND))
        for x_TD, target_T, grad_x_TD in zip(*pieces, strict=True):
            logits_TV = x_TD @ w_VD.T
            rows = torch.arange(len(target_T), device=x_ND.device)
            log_sums_T = logits_TV.logsumexp(dim=-1)
            total += (log_sums_T - logits_TV[rows, target_T]).sum()
            grad_TV = logits_TV.sub_(log_sums_T[:, None]).exp_()
            grad_TV[rows, target_T] -= 1
            grad_TV /= len(target_N)
            torch.mm(grad_TV, w_VD, out=grad_x_TD)
            grad_w_VD.addmm_(grad_TV.T, x_TD)
            del logits_TV, grad_TV  # otherwise two tiles are alive at once
        ctx.save_for_backward(grad_x_ND, grad_w_VD)
        return total / len(target_N)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_x_ND, grad_w_VD = ctx.saved_tensors
        (scale,) = grad_outputs
        return grad_x_ND.mul_(scale), grad_w_VD.mul_(scale), None, None


def _tiles(x: Tensor, chunks: int) -> tuple[Tensor, ...]:
    return x.flatten(0, -2).chunk(chunks)
