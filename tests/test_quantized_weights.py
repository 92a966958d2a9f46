"""Frozen weights in 8 bits, dequantized in the forward, with LoRA beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.torch_internals.graphs import tree_map
from tests.checks import compiled, errors, gradients, kinds
from tests.models import GatedMLP, TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op

VOCABULARY, WIDTH, RANK = 2048, 64, 4
aten = torch.ops.aten


@torch.library.custom_op("mstpass_tests::dequantize", mutates_args=())
def _dequantize(quantized: Tensor, scale: Tensor) -> Tensor:
    return quantized.float() * scale


@_dequantize.register_fake
def _(quantized: Tensor, scale: Tensor) -> Tensor:
    return torch.empty(quantized.shape, dtype=torch.float32, device=quantized.device)


class Int8Tensor(Tensor):
    """A float32 weight that holds int8 and a scale for each row, as torchao's tensors do."""

    @staticmethod
    def __new__(cls, quantized: Tensor, scale: Tensor) -> Int8Tensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, quantized.shape, dtype=scale.dtype, device=quantized.device
        )

    def __init__(self, quantized: Tensor, scale: Tensor) -> None:
        self.quantized, self.scale = quantized, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["quantized", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Int8Tensor:
        return cls(parts["quantized"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.quantized.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(args[0].quantized, args[0].scale)
        wide = lambda x: x.quantized.float() * x.scale if isinstance(x, cls) else x
        return func(*tree_map(wide, args), **(kwargs or {}))


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


class Quantized(nn.Module):
    def __init__(self, linear: nn.Linear, dequantize: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        quantized, scale = _quantized(linear.weight)
        self.register_buffer("quantized", quantized)
        self.register_buffer("scale", scale)
        self.dequantize = dequantize

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(self.quantized, self.scale))


class _Subclass(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(Int8Tensor(*_quantized(linear.weight)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LoRA(nn.Module):
    def __init__(self, base: nn.Module, width_in: int, width_out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(width_in, RANK, bias=False)
        self.up = nn.Linear(RANK, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


QUANTIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": lambda linear: Quantized(linear, lambda q, scale: q.float() * scale),
    "uint8": lambda linear: Quantized(
        linear, lambda q, scale: (q.view(torch.uint8).bitwise_xor(128).float() - 128) * scale
    ),
    "custom op": lambda linear: Quantized(linear, _dequantize),
    "subclass": _Subclass,
}


class Model(TinyLM):
    def __init__(self, quantize: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.mlp = GatedMLP(WIDTH, 3 * WIDTH, "silu")
        for name in ("gate", "up", "down"):
            linear = getattr(self.mlp, name)
            adapted = LoRA(quantize(linear), linear.in_features, linear.out_features)
            setattr(self.mlp, name, adapted)
        self.head = quantize(self.head)  # type: ignore[assignment]
        self.embed.requires_grad_(False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x + self.mlp(x)


@pytest.mark.full
@pytest.mark.parametrize("kind", QUANTIZED)
def test_gradients_of_the_adapters(kind: str) -> None:
    model = Model(QUANTIZED[kind])
    ids = torch.randint(VOCABULARY, (2, 256))
    right = gradients(model, lambda ids: next_token_loss(model, ids), [ids])
    step = compiled(lambda ids: next_token_loss(model, ids), chunk_tokens=128)
    assert max(errors(gradients(model, step, [ids]), right)) < 1e-5
    assert len(right) == 1 + 2 + 6  # the loss; the norm; the adapters
    assert kinds(mstpass.reports()[-1])[0] == ("lm_head", "fused")
    assert any(kind == "mlp" for kind, _ in kinds(mstpass.reports()[-1]))
