"""Workloads in plain PyTorch: an LM head, a chain of MLPs, and a Llama-like model.

Shapes: B batch, S length, N = B * S tokens, D width, L MLP width, V vocabulary.

Hand-written tiling over the tokens, of MLPs and of the head, as in MST and ALST.

The forward of the MLP runs tile by tile, and saves only its input. Its backward recomputes each
tile. The head computes loss and gradients of each tile in the forward. (MST: arXiv 2407.15892.
ALST: `TiledMLP` and `TiledFusedLogitsLoss`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


def tiled_mlp(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """`module(x)`, computed in `chunks` tiles of the rows of x, one after the other."""
    tiles = (checkpoint(module, tile, use_reentrant=False) for tile in _tiles(x, chunks))
    return torch.cat([*tiles]).view_as(x)


def tiled_head_loss(x_ND: Tensor, w_VD: Tensor, target_N: Tensor, chunks: int) -> Tensor:
    """Mean cross-entropy of the logits `x @ w.T`, of which only one tile exists at a time."""
    return _TiledHeadLoss.apply(x_ND, w_VD, target_N, chunks)


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


# ---- the workloads -------------------------------------------------------------------------------
LossFn = Callable[[], Tensor]


@dataclass(frozen=True)
class Step:
    """A training step: a call runs forward and backward, and frees the gradients at its end.

    Attributes:
        fn: computes the loss, or another value.
        leaves: tensors whose gradients are computed.
        tangent: gradient of the value, where that is not a scalar loss.
        loss: computes a scalar loss from the value; the step holds the value until the backward is
            over, as most training loops do.
    """

    fn: LossFn
    leaves: Sequence[Tensor]
    tangent: Tensor | None = None
    loss: Callable[[Tensor], Tensor] | None = None

    def __call__(self) -> Tensor:
        return self.with_gradients()[0]

    def with_gradients(self) -> tuple[Tensor, list[Tensor]]:
        value = self.fn()
        (self.loss(value) if self.loss else value).backward(self.tangent)
        gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None  # an optimizer's zero_grad() does so before the next step
        return value.detach(), [g for g in gradients if g is not None]


@dataclass(frozen=True)
class Work:
    """What is computed, and what makes a step of a function that computes it.

    Attributes:
        fn: computes the loss, or another value, from ``args``.
        leaves, tangent, loss: as of `Step`.
        seed: of each step, where it draws random numbers.
        tolerances: the largest relative errors of the value, and of a gradient.
        make: the kind of step.
        flops: floating-point operations of a step, nothing counted twice.
    """

    fn: Callable[..., Tensor]
    leaves: Sequence[Tensor]
    tangent: Tensor | None = None
    loss: Callable[[Tensor], Tensor] | None = None
    seed: int | None = None
    tolerances: tuple[float, float] = (1e-5, 1e-4)
    make: type[Step] = Step
    args: tuple[Any, ...] = ()
    flops: float | None = None

    @staticmethod
    def of(model: nn.Module, fn: Callable[..., Tensor], *inputs: Tensor, **more: Any) -> Work:
        """The step of a model, with gradients of these inputs and of all that is trained."""
        return Work(fn, [*inputs, *(p for p in model.parameters() if p.requires_grad)], **more)

    def loss_fn(self, fn: Callable[..., Tensor] | None = None) -> LossFn:
        """The own function of the arguments, or another one, as a function of none."""
        chosen = fn or self.fn
        return (lambda: chosen(*self.args)) if self.args else chosen

    def step(self, fn: LossFn) -> Step:
        def seeded() -> Tensor:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            return fn()

        return self.make(seeded, self.leaves, self.tangent, self.loss)


@dataclass(frozen=True)
class Head:
    """An LM head with cross-entropy: gradients of the weight and of the hidden states.

    Shapes: hidden (N, D), weight (V, D), target (N,).
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @staticmethod
    def build(
        tokens: int,
        width: int,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> Head:
        torch.manual_seed(0)
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        x_ND = torch.randn(tokens, width, **kind).requires_grad_()
        w_VD = (torch.randn(vocabulary, width, **kind) * width**-0.5).requires_grad_()
        return Head(x_ND, w_VD, torch.randint(vocabulary, (tokens,), device=device))

    def loss(self) -> Tensor:
        return F.cross_entropy(F.linear(self.hidden, self.weight), self.target)

    def work(self, loss_fn: LossFn | None = None, **more: Any) -> Work:
        """The head under its own loss, or under another one."""
        return Work(loss_fn or self.loss, (self.hidden, self.weight), **more)

    def floor_bytes(self, chunks: int) -> int:
        """Bytes that no loop can avoid: weight gradient, input gradient, one chunk of logits."""
        tokens, vocabulary = self.hidden.shape[0], self.weight.shape[0]
        logits = -(-tokens // chunks) * vocabulary
        return (self.weight.numel() + self.hidden.numel() + logits) * self.weight.element_size()


class SwiGLU(nn.Module):
    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_ND)) * self.up(x_ND))


@dataclass(frozen=True)
class MLPs:
    """A chain of SwiGLU layers as inside of a model: its output receives a random gradient."""

    layers: nn.Sequential
    hidden: Tensor
    tangent: Tensor

    @staticmethod
    def build(
        tokens: int,
        width: int,
        mlp_width: int,
        layers: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> MLPs:
        torch.manual_seed(0)
        with made_on(device, dtype):
            chain = nn.Sequential(*(SwiGLU(width, mlp_width) for _ in range(layers)))
        x_ND, tangent_ND = torch.randn(2, tokens, width, device=device, dtype=dtype)
        return MLPs(chain, x_ND.clone().requires_grad_(), tangent_ND)

    def value(self) -> Tensor:
        return self.layers(self.hidden)

    def work(self, **more: Any) -> Work:
        return Work.of(self.layers, self.value, self.hidden, **{"tangent": self.tangent, **more})


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of the model and of one batch.

    Attributes:
        key_value_heads: how many heads keys and values have; 0: as many as queries.
    """

    width: int = 256
    layers: int = 4
    heads: int = 4
    mlp_width: int = 1024
    vocabulary: int = 32_000
    length: int = 2048
    batch: int = 1
    key_value_heads: int = 0

    def __str__(self) -> str:
        grouped = f", {self.key_value_heads} of them with keys" if self.key_value_heads else ""
        return (
            f"d={self.width}, L={self.layers}, {self.heads} heads{grouped}, l={self.mlp_width}, "
            f"V={self.vocabulary}, N={self.batch * self.length} (B={self.batch}), fp32"
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.head_width, self.grouped = width // heads, key_value_heads not in (0, heads)
        of_keys = width // heads * (key_value_heads or heads)
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, features, bias=False) for features in (width, of_keys, of_keys, width)
        )

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x_BSD.shape[:2], -1, self.head_width)
        q, k, v = (p(x_BSD).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o(y.transpose(1, 2).reshape(x_BSD.shape))


class Layer(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(size.width), RMSNorm(size.width)
        self.attention = Attention(size.width, size.heads, size.key_value_heads)
        self.mlp = SwiGLU(size.width, size.mlp_width)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, mlp_chunks: int) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        h_BSD = self.mlp_norm(x_BSD)
        if mlp_chunks > 1:
            return x_BSD + tiled_mlp(self.mlp, h_BSD, mlp_chunks)
        return x_BSD + self.mlp(h_BSD)


class Llama(nn.Module):
    """Pre-norm blocks with rotary positions and an untied head. Returns the loss.

    With `chunks` > 1, MLPs and head are tiled by hand. With `checkpointed`, the backward recomputes
    each layer.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        head_width = size.width // size.heads
        rates = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angles = torch.outer(torch.arange(size.length), rates).repeat(1, 2)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))

    def forward(
        self, ids_BS: Tensor, target_BS: Tensor, checkpointed: bool = False, chunks: int = 1
    ) -> Tensor:
        x_BSD = self.embed(ids_BS)
        cos, sin = self.cos[: ids_BS.shape[1]], self.sin[: ids_BS.shape[1]]
        for layer in self.layers:
            arguments = (x_BSD, cos, sin, chunks)
            if checkpointed:
                x_BSD = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x_BSD = layer(*arguments)
        x_ND, target_N = self.norm(x_BSD).flatten(0, 1), target_BS.flatten()
        if chunks > 1:
            return tiled_head_loss(x_ND, self.head.weight, target_N, chunks)
        return F.cross_entropy(self.head(x_ND), target_N)


def llama(size: LlamaSize, device: torch.device) -> tuple[Llama, Tensor, Tensor]:
    """A model and its batch: token ids and next tokens, both (B, S)."""
    torch.manual_seed(0)
    model = Llama(size).to(device)
    stream = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=device)
    return model, stream[:, :-1].clone(), stream[:, 1:].clone()


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Within it, modules are made on a device, with weights of a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
