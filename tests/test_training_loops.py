"""What stands around a compiled step in real training loops: hooks, stances, offloading, batches.

Scalers, clipping, fused optimizers and averages of weights: examples/gradient_accumulation.py.
Quantized weights and LoRA: examples/lora.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import RecompileError

import mstpass
from tests.checks import check_against_float64, compiled, errors, gradients, kinds
from tests.models import Attention, Block, GatedMLP, TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op

VOCABULARY, WIDTH, BATCH, LENGTH = 2048, 64, 2, 256
IGNORED = -100


def _ids() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH))


def _tiny() -> tuple[TinyLM, Callable[[Tensor], Tensor]]:
    """A model without MLPs, and its compiled loss."""
    model = TinyLM(VOCABULARY, WIDTH)
    return model, compiled(lambda ids: next_token_loss(model, ids), chunk_tokens=128)


class LM(nn.Module):
    """A block with attention under a mask, an MLP, a head and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), MaskedAttention(WIDTH, 2)
        self.block = Block(WIDTH, GatedMLP(WIDTH, 3 * WIDTH, "silu"))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor, mask: Tensor) -> Any:
        x_BSD = self.embed(ids_BS) + self.positions(positions_BS)
        x_BSD = self.block(x_BSD + self.attention(self.norm(x_BSD), mask))
        return F.cross_entropy(self.head(x_BSD).flatten(0, 1), labels_BS.flatten())


class MaskedAttention(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def _causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def _batch(packed: bool) -> tuple[Tensor, ...]:
    """Ids, labels, positions, mask: documents in a row, or sequences that begin late."""
    ids_BS = _ids()
    if packed:
        positions_BS = torch.arange(LENGTH).expand(BATCH, -1) % 100
        document_BS = (positions_BS == 0).cumsum(-1)
        mask = (document_BS[:, None, :, None] == document_BS[:, None, None, :]) & _causal()
        return ids_BS, ids_BS.masked_fill(positions_BS == 0, IGNORED), positions_BS, mask
    real_BS = torch.arange(LENGTH) >= torch.tensor([[0], [90]])
    positions_BS = (real_BS.cumsum(-1) - 1).clamp(min=0)
    mask = (real_BS[:, None, None, :] & _causal()) | torch.eye(LENGTH, dtype=torch.bool)
    return ids_BS, ids_BS.masked_fill(~real_BS, IGNORED), positions_BS, mask


# ---- hooks ---------------------------------------------------------------------------------------
def test_an_optimizer_in_the_backward() -> None:
    """Each parameter is updated, and its gradient freed, as soon as the backward has it."""
    model, loss_of = _tiny()
    plain = copy.deepcopy(model)
    ids = _ids()

    def train(one: nn.Module, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in one.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            loss(ids).backward()
            assert all(p.grad is None for p in one.parameters())
        return [p.detach() for p in one.parameters()]

    right = train(plain, lambda ids: next_token_loss(plain, ids))  # type: ignore[arg-type]
    assert max(errors(train(model, loss_of), right)) < 1e-5
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")]


def test_saved_values_are_offloaded_by_hooks() -> None:
    """Hooks around the compiled call get what its forward saves; the gradients stay the same."""
    model, loss_of = _tiny()
    ids = _ids()
    right = gradients(model, lambda ids: next_token_loss(model, ids), [ids])
    packed_bytes: list[int] = []

    def pack(value: Tensor) -> Tensor:
        packed_bytes.append(value.nbytes)
        return value.clone()

    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value),
        torch.autograd.graph.save_on_cpu(),
    ):

        def hooked(ids: Tensor, hooks: Any = hooks) -> Tensor:
            with hooks:
                return loss_of(ids)

        assert max(errors(gradients(model, hooked, [ids]), right)) < 1e-5
    report = mstpass.reports()[-1]
    assert kinds(report) == [("lm_head", "fused")]
    logits_bytes = BATCH * LENGTH * VOCABULARY * 4
    assert packed_bytes and max(packed_bytes) < logits_bytes


# ---- stances -------------------------------------------------------------------------------------
def test_stances() -> None:
    model, loss_of = _tiny()
    ids, shorter = _ids(), _ids()[:, :200]
    before = len(mstpass.reports())

    def is_right(ids: Tensor) -> bool:
        right = gradients(model, lambda ids: next_token_loss(model, ids), [ids])
        return max(errors(gradients(model, loss_of, [ids]), right)) < 1e-5

    with torch.compiler.set_stance("force_eager"):
        assert is_right(ids) and len(mstpass.reports()) == before
        options = {"chunk_tokens": 128}
        explained = mstpass.explain(lambda ids: next_token_loss(model, ids), ids, options=options)
        assert kinds(explained) == [("lm_head", "fused")]
    assert is_right(ids) and len(mstpass.reports()) == before + 1
    with torch.compiler.set_stance("eager_on_recompile"):
        assert is_right(ids) and is_right(shorter)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert is_right(ids)
        with pytest.raises((RuntimeError, RecompileError), match=r"(?i)recompile"):
            loss_of(shorter)
    assert len(mstpass.reports()) == before + 1


# ---- compiled autograd ---------------------------------------------------------------------------
@contextlib.contextmanager
def _compiled_autograd(backend: str) -> Iterator[None]:
    compiler = torch.compile(backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(compiled_autograd=True), compiled_autograd._enable(compiler):
        yield


def test_loops_in_the_backward_are_refused_under_compiled_autograd() -> None:
    model, batch = LM(), _batch(packed=True)
    options = {"chunk_tokens": 128}
    assert ("mlp", "save") in kinds(mstpass.explain(model, *batch, options=options))
    with torch._dynamo.config.patch(compiled_autograd=True):
        report = mstpass.explain(model, *batch, options=options)
    assert kinds(report) == [("lm_head", "fused")]
    (refused,) = (r for r in report.rejections if "block.mlp" in r.source)
    assert "compiled autograd" in refused.reason and "compiled_autograd" in refused.fix


@pytest.mark.full
def test_compiled_autograd_compiles_the_backward_whole() -> None:
    model, batch = LM(), _batch(packed=True)
    right = gradients(model, model, batch)
    with _compiled_autograd("mst"):
        step = torch.compile(model, backend="mst", options={"chunk_tokens": 128, "strict": True})
        found = gradients(model, step, batch)
    assert max(errors(found, right)) < 1e-5
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")]


def test_a_hook_on_a_gradient_under_compiled_autograd() -> None:
    """The hook is an input of the graph, whose backward Inductor alone could not compile."""

    def loss(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        hidden_ND = x_ND.tanh()
        hidden_ND.register_hook(lambda gradient: 2 * gradient)
        return F.cross_entropy(hidden_ND @ weight_VD.t(), labels_N)

    leaves = [torch.randn(n, WIDTH, requires_grad=True) for n in (512, VOCABULARY)]
    labels = torch.arange(512)
    right = torch.autograd.grad(loss(*leaves, labels), leaves)
    with _compiled_autograd("mst"):
        compiled(loss, chunk_tokens=128)(*leaves, labels).backward()
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == 2 and max(errors(found, right)) < 1e-5


# ---- nested compile regions ----------------------------------------------------------------------
@torch.compiler.nested_compile_region
def _region(block: nn.Module, x_BSD: Tensor) -> Tensor:
    return block(x_BSD)


class Nested(TinyLM):
    """Blocks that are traced and compiled once."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        mlps = (GatedMLP(WIDTH, 3 * WIDTH, "silu") for _ in range(2))
        self.blocks = nn.ModuleList(Block(WIDTH, mlp) for mlp in mlps)

    def hidden(self, ids: Tensor) -> Tensor:
        x_BSD = super().hidden(ids)
        for block in self.blocks:
            x_BSD = _region(block, x_BSD)
        return x_BSD


def test_a_nested_region_is_not_taken_for_the_graph_that_calls_it() -> None:
    model = Nested()
    report = mstpass.explain(lambda ids: next_token_loss(model, ids), _ids())
    assert kinds(report) == [("lm_head", "fused")]
    assert "higher-order op" in report.outcome.left_to_torch


@pytest.mark.full
def test_a_nested_region_has_a_report_of_its_own() -> None:
    model = Nested()
    before = len(mstpass.reports())
    ids = _ids()
    right = gradients(model, lambda ids: next_token_loss(model, ids), [ids])
    step = compiled(lambda ids: next_token_loss(model, ids), chunk_tokens=128)
    assert max(errors(gradients(model, step, [ids]), right)) < 1e-5
    region, whole = mstpass.reports()[before:]
    assert kinds(region) == [("mlp", "save")] and kinds(whole) == [("lm_head", "fused")]
    assert any("nested compile region" in note for note in region.outcome.notes)
    torch.compiler.reset()  # from the cache, the same reports
    assert max(errors(gradients(model, step, [ids]), right)) < 1e-5
    again = mstpass.reports()[before + 2 :]
    assert [kinds(report) for report in again] == [kinds(region), kinds(whole)]


# ---- batches -------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "left padding"])
def test_batches_with_masks_and_positions(packed: bool) -> None:
    model, batch = LM(), _batch(packed)
    report = check_against_float64(model, lambda m: m, batch, chunk_tokens=128)
    assert ("lm_head", "fused") in kinds(report) and ("mlp", "save") in kinds(report)


@pytest.mark.full
@pytest.mark.parametrize("kind", [torch.tensor, int, float])
def test_the_number_of_items_in_a_batch(kind: Callable[[int], Any]) -> None:
    """A number of Python's own is compiled in at first, and an input from the second value on."""
    model, ids = TinyLM(VOCABULARY, WIDTH), _ids()
    loss = lambda ids, count: next_token_loss(model, ids, reduction="sum") / count
    step = compiled(loss, chunk_tokens=128)
    before = len(mstpass.reports())
    for count in (700, 900, 1000, 1100):
        right = gradients(model, functools.partial(loss, count=count), [ids])
        found = gradients(model, functools.partial(step, count=kind(count)), [ids])
        assert max(errors(found, right)) < 1e-5
    reports = mstpass.reports()[before:]
    assert len(reports) == (1 if kind is torch.tensor else 2)
    assert all(kinds(report) == [("lm_head", "fused")] for report in reports)


FROZEN = {
    "body": lambda model: (model.embed, model.norm),
    "head": lambda model: (model.head,),
    "all but the norm": lambda model: (model.embed, model.head),
}


@pytest.mark.full
@pytest.mark.parametrize("part", FROZEN)
def test_frozen_parts(part: str) -> None:
    model = TinyLM(VOCABULARY, WIDTH)
    for frozen in FROZEN[part](model):
        frozen.requires_grad_(False)
    step = lambda m: lambda ids: next_token_loss(m, ids)
    report = check_against_float64(model, step, [_ids()], chunk_tokens=128)
    assert kinds(report) == [("lm_head", "fused")]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor(mode: str) -> None:
    model, ids = TinyLM(8 * VOCABULARY, WIDTH), _ids()
    right = gradients(model, lambda ids: next_token_loss(model, ids), [ids])
    step = torch.compile(lambda ids: next_token_loss(model, ids), backend="mst", mode=mode)
    assert max(errors(gradients(model, step, [ids]), right)) < 1e-5
    assert kinds(mstpass.reports()[-1]) == [("lm_head", "fused")]


def test_a_mode_that_does_not_exist_is_named() -> None:
    with pytest.raises(Exception, match="mode=fast"):
        torch.compile(lambda x: x.sin().sum(), backend="mst", mode="fast")(torch.ones(3))
