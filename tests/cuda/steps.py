"""Steps that are compiled for a GPU. Their tensors are on the meta device: they take no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attention_models import Form, Layer
from tests.cuda.dry_run import tensor
from tests.models import GatedMLP, TwoLayerMLP

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def head(
    tokens: int = 8192, width: int = 1024, vocabulary: int = 128256, dtype: torch.dtype = BF16
) -> Step:
    """A language model's head with its loss."""
    with torch.device("meta"):
        lm_head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(lm_head(x).float(), labels)

    labels = torch.empty(tokens, dtype=torch.long, device="meta")
    return loss, (tensor(tokens, width, dtype=dtype, grad=True), labels)


class Layers(nn.Module):
    """Two MLPs with their norms and residuals, and a norm behind them."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        wide = 4 * width
        mlp: Callable[[], nn.Module] = {
            "swiglu": lambda: GatedMLP(width, wide, "silu"),
            "gelu": lambda: TwoLayerMLP(width, wide, "gelu", bias=True),
        }[kind]
        self.mlps = nn.ModuleList(mlp() for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in zip(self.norms, self.mlps, strict=False):
            x = x + mlp(norm(x))
        return self.norms[-1](x)


class Blocks(Layers):
    """Attention of grouped queries before each of the MLPs, and a head."""

    def __init__(self, width: int):
        super().__init__(width, "swiglu")
        form = Form(kv_heads=2, mask="causal", shared_kv=True)
        self.attention = nn.ModuleList(Layer(form, width, heads=8) for _ in self.mlps)
        self.head = nn.Linear(width, 8 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm, mlp in zip(self.attention, self.norms, self.mlps, strict=False):
            x = attention(x)
            x = x + mlp(norm(x))
        return self.head(self.norms[-1](x)).flatten(0, 1)


def blocks(tokens: int = 16384, width: int = 512) -> Step:
    with torch.device("meta"):
        model = Blocks(width).to(BF16)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float(), labels)

    labels = torch.empty(tokens, dtype=torch.long, device="meta")
    return loss, (tensor(1, tokens, width, dtype=BF16, grad=True), labels)


def mlps(
    kind: str = "swiglu", tokens: int = 16384, width: int = 1024, dtype: torch.dtype = BF16
) -> Step:
    with torch.device("meta"):
        layers = Layers(width, kind).to(dtype)

    def loss(x: Tensor) -> Tensor:
        return layers(x).float().square().mean()

    return loss, (tensor(tokens, width, dtype=dtype, grad=True),)


def mlp_in_sections(tokens: int = 4096, width: int = 2048, hidden: int = 8192) -> Step:
    """An MLP whose gradient mixes tokens, so that its backward is a loop of its own."""
    with torch.device("meta"):
        mlp = GatedMLP(width, hidden, "silu").to(BF16)

    def loss(x: Tensor) -> Tensor:
        y = mlp(x).float()
        return (y * y.mean(0).cos()).square().mean()

    return loss, (tensor(tokens, width, dtype=BF16, grad=True),)


def causal_lm(model: str, masked: bool = False, tokens: int = 8192, **sizes: int) -> Step:
    """A small model of transformers with its own loss; ``masked`` gives it a mask of padding."""
    import transformers

    config = getattr(transformers, f"{model}Config")(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
        **sizes,
    )
    with torch.device("meta"):
        lm = getattr(transformers, f"{model}ForCausalLM")(config).to(BF16)
        ids = torch.empty(1, tokens, dtype=torch.long)
        mask = torch.empty(1, tokens, dtype=torch.long)
    if masked:
        return lambda ids, mask: lm(input_ids=ids, labels=ids, attention_mask=mask).loss, (
            ids,
            mask,
        )
    return lambda ids: lm(input_ids=ids, labels=ids).loss, (ids,)


def flex_attention(tokens: int = 8192, width: int = 1024, vocabulary: int = 128256) -> Step:
    """A layer with FlexAttention, whose forward and backward are higher-order ops, and a head."""
    from torch.nn.attention.flex_attention import flex_attention

    with torch.device("meta"):
        qkv = nn.Linear(width, 3 * width, bias=False, dtype=BF16)
        out = nn.Linear(width, width, bias=False, dtype=BF16)
        lm_head = nn.Linear(width, vocabulary, bias=False, dtype=BF16)

    def causal(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.where(row >= column, score, -float("inf"))

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = qkv(x).view(1, tokens, 16, -1).transpose(1, 2).chunk(3, -1)
        attended = flex_attention(q, k, v, score_mod=causal)
        assert isinstance(attended, Tensor)
        hidden = x + out(attended.transpose(1, 2).reshape(tokens, width))
        return F.cross_entropy(lm_head(hidden).float(), labels)

    labels = torch.empty(tokens, dtype=torch.long, device="meta")
    return loss, (tensor(tokens, width, grad=True), labels)


def autocast(step: Step) -> Step:
    fn, inputs = step

    def loss(*inputs: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            result: Tensor = fn(*inputs)
            return result

    return loss, inputs
