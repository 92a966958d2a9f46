"""Attention masks that follow from positions become flags of the kernel; all others stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import mstpass
from mstpass.graph.joint import JointGraph
from mstpass.measure import peak_bytes
from mstpass.normalize.masks_as_flags import WithoutMasks, masks_as_flags
from mstpass.torch_internals.attention_kernels import EFFICIENT
from tests.checks import check_against_float64, compiled, joint_graph

pytestmark = pytest.mark.sampled(8)

Mask = Callable[[int, int, Tensor], Tensor]  # queries, keys, the input; to [queries, keys] or wider
HEADS, FEATURES = 2, 8
CAUSAL, ALL = "causal", "all true"
CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _positions(queries: int, keys: int, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.arange(queries, device=x.device)
    return rows[:, None], torch.arange(keys, device=x.device)[None, :]


def _offset(queries: int, keys: int, x: Tensor) -> Tensor:
    row, column = _positions(queries, keys, x)
    return column - row


def _causal(queries: int, keys: int, x: Tensor) -> Tensor:
    row, column = _positions(queries, keys, x)
    return column <= row


def _window(queries: int, keys: int, x: Tensor, width: int = 4) -> Tensor:
    row, column = _positions(queries, keys, x)
    return (column <= row) & (column > row - width)


PROVEN: dict[str, tuple[Mask, str]] = {
    "causal": (_causal, CAUSAL),
    "added": (lambda q, k, x: torch.full((q, k), -math.inf).triu(1), CAUSAL),
    "a window that is as long": (lambda q, k, x: _window(q, k, x, k), CAUSAL),
    "of each sequence": (lambda q, k, x: _causal(q, k, x)[None, None].expand(2, 1, q, k), CAUSAL),
    "ones": (lambda q, k, x: torch.ones(q, k, dtype=torch.bool, device=x.device), ALL),
    "zeros that are added": (lambda q, k, x: torch.zeros(q, k), ALL),
    "for all queries": (lambda q, k, x: torch.ones(1, k, dtype=torch.bool), ALL),
}
LEFT: dict[str, Mask] = {
    "strictly before": lambda q, k, x: _offset(q, k, x) < (_positions(q, k, x)[0] < 1).long(),
    "one later": lambda q, k, x: _offset(q, k, x) <= 1,
    "transposed": lambda q, k, x: _offset(q, k, x) >= 0,
    "a window": _window,
    "padding": lambda q, k, x: _causal(q, k, x) & (x.detach()[0, :, 0] < 9)[None],
    "a slope": lambda q, k, x: _offset(q, k, x).float(),
    "small numbers": lambda q, k, x: torch.full((q, k), -10.0, device=x.device).triu(1),
}


class Attention(nn.Module):
    """Attention of ``x`` to the first rows of ``x``, or to all."""

    def __init__(self, mask: Mask, keys: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.mask, self.keys, self.dropout = mask, keys, dropout
        self.qkv = nn.Linear(HEADS * FEATURES, 3 * HEADS * FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, FEATURES).permute(2, 0, 3, 1, 4)
        k, v = k[:, :, : self.keys], v[:, :, : self.keys]
        mask = self.mask(n, k.shape[2], x)
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout).square().mean()


def _input(tokens: int = 16) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, tokens, HEADS * FEATURES)


def _without_masks(module: nn.Module, *inputs: Tensor, dynamic: bool = False) -> WithoutMasks:
    graph, num_outputs = joint_graph(module, *inputs, dynamic=dynamic)
    return masks_as_flags(JointGraph(graph, num_outputs))


def _ops(result: WithoutMasks, packet: Any) -> list[fx.Node]:
    return [node for node in result.joint.nodes if node.target == packet.default]


def _flags(result: WithoutMasks, packet: Any = CPU) -> list[tuple[bool, bool]]:
    """Of each op, forward and backward, whether it is causal, and whether it has a mask."""
    found = []
    for name in ("", "_backward"):
        op = getattr(torch.ops.aten, str(packet).removeprefix("aten.") + name)
        for node in _ops(result, op):
            names = [argument.name for argument in op.default._schema.arguments]
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            found.append((bool(given.get("is_causal")), given.get("attn_mask") is not None))
    return found


def _has_square(result: WithoutMasks, tokens: int) -> bool:
    """Whether a value has the queries and the keys as its last dims."""
    values = [node.meta.get("val") for node in result.joint.nodes]
    return any(
        isinstance(value, Tensor) and value.shape[-2:] == (tokens, tokens) for value in values
    )


@pytest.mark.op_by_op
@pytest.mark.parametrize("name", PROVEN)
def test_a_flag_replaces_the_mask(name: str) -> None:
    mask, kind = PROVEN[name]
    result = _without_masks(Attention(mask), _input(64))
    assert _flags(result) == [(kind == CAUSAL, False)] * 2
    assert not _has_square(result, 64)
    (note,) = result.notes
    assert f"proven to be {kind}" in note and not result.rejections


@pytest.mark.op_by_op
@pytest.mark.parametrize("name", LEFT)
def test_other_masks_stay(name: str) -> None:
    result = _without_masks(Attention(LEFT[name]), _input())
    assert _flags(result) == [(False, True)] * 2
    assert not result.notes and not result.rejections  # it is small


@pytest.mark.op_by_op
def test_fewer_keys_than_queries() -> None:
    """The kernels do not agree on where a causal mask of other shapes begins."""
    assert _flags(_without_masks(Attention(_causal, keys=8), _input())) == [(False, True)] * 2
    ones, _ = PROVEN["ones"]
    assert _flags(_without_masks(Attention(ones, keys=8), _input())) == [(False, False)] * 2


@pytest.mark.op_by_op
@pytest.mark.parametrize(("mask", "proven"), [(_causal, True), (_window, False)])
def test_symbolic_lengths(mask: Mask, proven: bool) -> None:
    """A mask is computed for the longest batch of a plan, so the plan must have one."""
    x = _input()
    assert _flags(_without_masks(Attention(mask), x, dynamic=True)) == [(False, True)] * 2
    torch._dynamo.mark_dynamic(x, 1, min=2, max=16)
    assert _flags(_without_masks(Attention(mask), x)) == [(proven, not proven)] * 2


@pytest.mark.op_by_op
def test_plans_by_length() -> None:
    """Each has a longest batch: that of its range."""
    step = compiled(Attention(_causal), dynamic=True)
    for tokens in (16, 40):
        step(_input(tokens)).backward()
        assert "proven to be causal" in " ".join(mstpass.reports()[-1].outcome.notes)


@pytest.mark.op_by_op
def test_what_is_left_is_reported_where_it_is_large() -> None:
    result = _without_masks(Attention(_window), _input(1024))
    (rejection,) = result.rejections
    assert "a window of 3 keys before and 0 after" in rejection.reason
    assert rejection.bytes == 4 * 1024**2
    padded = _without_masks(Attention(LEFT["padding"]), _input(1024))
    assert not padded.rejections  # it depends on data


@pytest.mark.op_by_op
@pytest.mark.parametrize("name", PROVEN)
def test_values(name: str) -> None:
    mask, kind = PROVEN[name]
    report = check_against_float64(Attention(mask), lambda m: m, [_input()], chunk="off")
    assert any(f"proven to be {kind}" in note for note in report.outcome.notes)


@pytest.mark.full
def test_peak() -> None:
    """Under Inductor: results as exact as eager's, and no mask in memory."""
    tokens = 512
    x, mask_bytes = _input(tokens), 4 * tokens**2
    check_against_float64(Attention(_causal), lambda m: m, [x])

    def peak(mask: Mask) -> int:
        torch.compiler.reset()
        step = compiled(Attention(mask))
        return peak_bytes(lambda: step(x).backward())

    assert peak(_causal) <= peak(lambda q, k, x: _window(q, k, x)) - 0.9 * mask_bytes


# ---- transformers' masks -------------------------------------------------------------------------
def _notes(model: nn.Module, gpu: str | None = None, tokens: int = 64) -> str:
    ids = torch.zeros(2, tokens, dtype=torch.long)
    report = mstpass.explain(lambda ids: model(input_ids=ids, labels=ids).loss, ids, gpu=gpu)
    return " ".join(report.outcome.notes)


@pytest.mark.op_by_op
def test_unchanged_models_of_transformers() -> None:
    """Layers with a window that is shorter than the sequence, and layers without."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "use_cache": False,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    assert "the mask of 2 attention ops is proven to be causal" in _notes(llama)
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **sizes, head_dim=8, sliding_window=16, layer_types=kinds
    )
    gemma = transformers.Gemma3ForCausalLM(config).bfloat16()
    notes = _notes(gemma, gpu="a100")
    assert "the mask of an attention op is proven to be causal" in notes
    assert "a window of 15 keys before and 0 after" in notes


# ---- for a GPU -----------------------------------------------------------------------------------
def _on_gpu(
    gpu: str, mask: Mask, dtype: torch.dtype = torch.bfloat16, **sizes: Any
) -> WithoutMasks:
    found: list[WithoutMasks] = []

    def keep(*args: Any, **kwargs: Any) -> WithoutMasks:
        found.append(masks_as_flags(*args, **kwargs))
        return found[-1]

    model = Attention(mask, **sizes).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mstpass.normalize.masks_as_flags", keep)
        mstpass.explain(model, _input(64).to(dtype), gpu=gpu)
    return found[0]


def _targets(result: WithoutMasks) -> set[str]:
    names = {str(node.target) for node in result.joint.nodes if "attention" in str(node.target)}
    return {name.removeprefix("aten.").removesuffix(".default") for name in names}


@pytest.mark.op_by_op
@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"),
    [
        ("a100", torch.bfloat16, "_scaled_dot_product_flash_attention"),
        ("h100", torch.bfloat16, "_scaled_dot_product_cudnn_attention"),
        ("a100", torch.float32, "_scaled_dot_product_efficient_attention"),  # flash is for 16 bits
    ],
)
@pytest.mark.parametrize("name", ["causal", "ones"])
def test_the_op_is_the_devices_own_choice(
    gpu: str, dtype: torch.dtype, kernel: str, name: str
) -> None:
    """What attention without a mask would have dispatched to."""
    mask, kind = PROVEN[name]
    result = _on_gpu(gpu, mask, dtype)
    if name == "ones" and not result.notes:  # Inductor of newer versions dropped the mask before
        assert torch.__version__ >= "2.14"
        kernel = EFFICIENT.removeprefix("aten::")
    assert _targets(result) == {kernel, f"{kernel}_backward"}
    assert _flags_of_any(result) == {kind == CAUSAL}
    assert not _has_square(result, 64)


def _flags_of_any(result: WithoutMasks) -> set[bool]:
    found = set()
    for node in result.joint.nodes:
        if "attention" in str(node.target) and node.op == "call_function":
            names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            assert given.get("attn_bias") is None
            found.add(bool(given.get("is_causal")))
    return found


@pytest.mark.op_by_op
def test_a_window() -> None:
    result = _on_gpu("a100", _window)
    assert _targets(result) == {"_flash_attention_forward", "_flash_attention_backward"}
    for node in result.joint.nodes:
        if "flash_attention" in str(node.target):
            assert node.kwargs["window_size_left"] == 3 and node.kwargs["window_size_right"] == 0
    assert not _has_square(result, 64)
    in_float32 = _on_gpu("a100", _window, torch.float32)
    assert "_scaled_dot_product_efficient_attention" in _targets(in_float32)
    with_dropout = _on_gpu("a100", _window, dropout=0.1)
    assert "_scaled_dot_product_efficient_attention" in _targets(with_dropout)


@pytest.mark.op_by_op
def test_dropout_keeps_its_op() -> None:
    """Other kernels draw other random numbers."""
    result = _on_gpu("a100", _causal, dropout=0.1)
    kernel = "_scaled_dot_product_efficient_attention"
    assert _targets(result) == {kernel, f"{kernel}_backward"} and _flags_of_any(result) == {True}
