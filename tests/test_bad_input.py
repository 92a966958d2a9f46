"""What Inductor compiles, mst compiles to the same result; its report says what mst left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mstpass
from tests.checks import compiled
from tests.models import MLPS, Block, TinyLM, next_token_loss

pytestmark = pytest.mark.op_by_op


def _same(fn: Callable[..., object], *inputs: object) -> mstpass.Report:
    """Same outputs and gradients as eager; returns the report."""
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    before = len(mstpass.reports())
    expected, found = fn(*inputs), compiled(fn)(*inputs)
    torch.testing.assert_close(found, expected)
    if leaves and expected.requires_grad:
        cotangent = torch.ones_like(expected)
        ours = torch.autograd.grad(found, leaves, cotangent)
        theirs = torch.autograd.grad(expected, leaves, cotangent)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    reports = mstpass.reports()[before:]
    return reports[-1] if reports else None  # type: ignore[return-value]


def test_nothing_to_chunk() -> None:
    report = _same(lambda x: (x.sin() * 2).sum(), torch.randn(8, 8, requires_grad=True))
    assert not report.regions and "nothing runs in chunks" in str(report)


def test_returned_logits_say_what_to_do() -> None:
    model = TinyLM(600, 32)
    ids = torch.randint(0, 600, (4, 256))
    hint = "lambda batch: model(**batch).loss"

    def both(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.logits(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

    compiled(both, chunk_tokens=256)(ids)[0].backward()
    report = mstpass.reports()[-1]
    assert [region.mode for region in report.regions] == ["save"] and hint in str(report)

    compiled(model.logits)(ids).sum().backward()
    report = mstpass.reports()[-1]
    assert not report.regions
    (rejection,) = report.rejections
    assert "logits are an output of the graph" in rejection.reason and hint in rejection.fix


@pytest.mark.parametrize("tokens", [0, 1, 3, 100])
def test_few_tokens(tokens: int) -> None:
    weight = torch.randn(600, 32, requires_grad=True)
    h = torch.randn(tokens, 32, requires_grad=True)
    labels = torch.randint(0, 600, (tokens,))
    report = _same(lambda h, w: F.cross_entropy(h @ w.t(), labels, reduction="sum"), h, weight)
    assert not report.regions


def test_fewer_tokens_than_a_forced_chunk() -> None:
    model = TinyLM(600, 32)
    ids = torch.randint(0, 600, (1, 100))
    step = compiled(lambda i: next_token_loss(model, i), chunk_tokens=128)
    torch.testing.assert_close(step(ids), next_token_loss(model, ids))
    assert "fit in one chunk" in str(mstpass.reports()[-1])


def test_double() -> None:
    block = Block(32, MLPS["swiglu"](32)).double()
    x = torch.randn(2, 300, 32, dtype=torch.double, requires_grad=True)
    _same(lambda x: block(x).sin().sum(), x)


def test_integers_and_complex() -> None:
    _same(lambda x: (x @ x.t()).sum(), torch.arange(600 * 4).view(600, 4))
    z = torch.randn(600, 4, dtype=torch.complex64, requires_grad=True)
    w = torch.randn(4, 64, dtype=torch.complex64)
    with pytest.warns(UserWarning, match="complex"):
        _same(lambda z: (z @ w).abs().sum(), z)


def test_sparse_and_nested_inputs_behave_as_with_inductor() -> None:
    w = torch.randn(32, 128, requires_grad=True)
    nested = torch.nested.nested_tensor(
        [torch.randn(5, 32), torch.randn(7, 32)], layout=torch.jagged
    )
    fn = lambda x, w: (x @ w).values().relu().sum()
    expected = fn(nested, w)
    torch.testing.assert_close(torch.compile(fn, backend="mst")(nested, w), expected)
    sparse = torch.eye(64).to_sparse()
    product = lambda s, w: torch.sparse.mm(s, w).sum()
    dense = torch.randn(64, 8, requires_grad=True)
    torch.testing.assert_close(
        torch.compile(product, backend="mst")(sparse, dense), product(sparse, dense)
    )


def test_subclass_inputs() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.randn(600, 32), torch.randn(600, 32))
    w = torch.randn(32, 128)
    fn = lambda x, w: (x @ w).relu().sum()
    found, expected = compiled(fn)(x, w), fn(x, w)
    torch.testing.assert_close(found.a, expected.a)
    torch.testing.assert_close(found.b, expected.b)


def test_inference_and_optimizer_steps() -> None:
    model = TinyLM(600, 32)
    ids = torch.randint(0, 600, (2, 300))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model.logits)(ids), model.logits(ids))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    next_token_loss(model, ids).backward()
    before = model.head.weight.detach().clone()
    torch.compile(optimizer.step, backend="mst")()
    assert not torch.equal(before, model.head.weight)


def test_mutated_buffers_and_dropout() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.bn = Block(32, MLPS["gelu"](32)), nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bn(F.dropout(self.block(x), 0.1, self.training).flatten(0, 1)).sin().sum()

    model = Model().eval()
    x = torch.randn(2, 300, 32, requires_grad=True)
    torch.testing.assert_close(compiled(model)(x), model(x))
    model.train()
    before = model.bn.running_mean.clone()
    loss = compiled(model)(x)
    loss.backward()
    assert torch.isfinite(loss) and not torch.equal(before, model.bn.running_mean)


def test_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(Block(32, MLPS["swiglu"](32)) for _ in range(2))

    def fn(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sin().sum()

    report = _same(fn, torch.randn(2, 300, 32, requires_grad=True))
    assert not report.outcome.notes


def test_a_failure_of_ours_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("mstpass.pipeline.run", broken)
    model = TinyLM(601, 32)
    ids = torch.randint(0, 601, (2, 300))
    inductor = {"fx_graph_cache": False}
    loss_fn = lambda i: next_token_loss(model, i)
    step = torch.compile(loss_fn, backend="mst", options={"inductor": inductor})
    with pytest.warns(UserWarning, match="on purpose") as caught:
        loss = step(ids)
    loss.backward()
    assert len([w for w in caught if "mstpass" in str(w.message)]) == 1
    torch.testing.assert_close(loss, loss_fn(ids))
    assert "on purpose" in str(mstpass.reports()[-1])
    torch.compiler.reset()
    with pytest.raises(Exception, match="strict=True"):
        compiled(loss_fn, inductor=inductor)(ids)


def test_chunk_off() -> None:
    model = TinyLM(600, 32)
    ids = torch.randint(0, 600, (2, 300))
    step = compiled(lambda i: next_token_loss(model, i), chunk="off")
    torch.testing.assert_close(step(ids), next_token_loss(model, ids))
    assert not mstpass.reports()[-1].regions


@pytest.mark.kernels
def test_a_failure_while_lowering_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("mstpass.inductor_hooks.lower_loops", broken)
    model = TinyLM(602, 32)
    ids = torch.randint(0, 602, (2, 300))
    loss_fn = lambda i: next_token_loss(model, i)
    step = torch.compile(loss_fn, backend="mst", options={"inductor": {"fx_graph_cache": False}})
    with pytest.warns(UserWarning, match="on purpose"):
        loss = step(ids)
    loss.backward()
    torch.testing.assert_close(loss, loss_fn(ids))


def test_a_failure_while_describing_the_graphs_ends_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("mstpass.backend.with_graph_ends", broken)
    monkeypatch.setattr("mstpass.passes.runner.LEAST", "off")  # as outside of the tests
    weight = torch.randn(4, 4, requires_grad=True)
    step = torch.compile(lambda x: (x @ weight).square().sum(), backend="mst")
    step(torch.randn(8, 4)).backward()
    assert weight.grad is not None
    torch.compiler.reset()
    step = torch.compile(
        lambda x: (x @ weight).cos().sum(), backend="mst", options={"strict": True}
    )
    with pytest.raises(Exception, match="on purpose"):
        step(torch.randn(8, 4))
