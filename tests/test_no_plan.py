"""A graph that no backward follows has a report that says so, and a budget in bytes is looked at.

Steps compile with kernels: what is looked at is Inductor's schedule.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass.measure import peak_bytes
from mstpass.memory.scheduled_peak import ReadSchedule
from mstpass.report import graph_ends
from mstpass.torch_internals.caches import cache_folder

WIDTH, WORDS = 64, 1000
WEIGHT = torch.randn(WORDS, WIDTH)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_ends, "_told", set())


def _batch(tokens: int = 512) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, WIDTH), torch.randint(WORDS, (tokens,))


def _loss(weight: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), labels)


def evaluation(x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return _loss(WEIGHT, x, labels)


def _gradients(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.grad_and_value(_loss)(WEIGHT, x, labels)


def _per_sample(x: Tensor, labels: Tensor) -> Tensor:
    gradient = torch.func.grad(_loss)
    return torch.func.vmap(gradient, (None, 0, 0))(WEIGHT, x[:, None], labels[:, None])


def _tangent(x: Tensor, labels: Tensor) -> Tensor:
    return torch.func.jvp(lambda w: _loss(w, x, labels), (WEIGHT,), (WEIGHT,))[1]


def detached(x: Tensor, labels: Tensor) -> Tensor:
    return _loss(WEIGHT, x, labels).detach()


def _compiled(step: Callable[..., Any], budget: float | str) -> Callable[..., Any]:
    options = {"strict": True, "memory_budget": budget}
    return torch.compile(step, backend="mst", options=options)


ITSELF = "it takes its gradients itself"


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, of its decompositions
@pytest.mark.parametrize(
    ("step", "why"),
    [
        (evaluation, "reads nothing that requires a gradient"),
        (_gradients, ITSELF),
        (_per_sample, ITSELF),
        (_tangent, ITSELF),
    ],
)
def test_its_report_says_why_and_has_the_measured_peak(step: Callable[..., Any], why: str) -> None:
    before, batch = len(mstpass.reports()), _batch()
    run = _compiled(step, "1GiB")
    run(*batch)
    (report,) = mstpass.reports()[before:]
    assert why in report.outcome.no_plan and "test_no_plan.py:" in str(report)
    assert f"no plan: {report.outcome.no_plan[:40]}" in str(report)
    assert report.peak_bytes == pytest.approx(peak_bytes(lambda: run(*batch)), rel=0.05)


def test_gradients_that_are_off_are_the_reason() -> None:
    weight = nn.Parameter(WEIGHT)
    run = _compiled(lambda x, y: _loss(weight, x, y), "1GiB")
    with torch.no_grad():
        run(*_batch())
    assert "gradients are off" in str(mstpass.reports()[-1])


def test_a_budget_that_it_exceeds_is_an_error_also_from_the_cache() -> None:
    for _ in range(2):
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"=1\.0 MiB cannot be met.*2\.2 MiB.*takes its grad"):
            _compiled(_gradients, "1MiB")(*_batch())


def test_evaluation_warns_once_of_a_budget_that_it_exceeds() -> None:
    """One warning for all lengths; their reports say it each. Without bytes there is none."""
    before = len(mstpass.reports())
    for budget in (0.0, "free", "3MiB", "1MiB"):
        torch.compiler.reset()
        options = {"memory_budget": budget}
        run = torch.compile(evaluation, backend="mst", dynamic=False, options=options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for tokens in (512, 640):
                run(*_batch(tokens))
        told = [str(w.message) for w in caught if "memory_budget" in str(w.message)]
        assert len(told) == (budget == "1MiB"), told
    of_last = mstpass.reports()[before:][-2:]
    assert len(mstpass.reports()) - before == 8
    assert ["1.0 MiB cannot be met" in str(report) for report in of_last] == [True, True]


def test_a_budget_that_nobody_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadSchedule, "peak_bytes", None)
    run = torch.compile(detached, backend="mst", options={"memory_budget": "1GiB"})
    with pytest.warns(UserWarning, match="=1.0 GiB was not looked at: no backward follows"):
        run(*_batch(768))
    torch.compiler.reset()
    with pytest.raises(Exception, match="was not looked at"):
        _compiled(detached, "2GiB")(*_batch(768))


def test_a_plan_whose_report_is_lost() -> None:
    """No plan is known then: that the cache had the graph proves nothing of a budget."""
    weight = nn.Parameter(WEIGHT)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        return _loss(weight, x, labels)

    for budget in (1.0, "1GiB"):
        torch.compiler.reset()
        _compiled(step, budget)(*_batch(576))
    assert not mstpass.reports()[-1].outcome.no_plan
    shutil.rmtree(cache_folder() / "mstpass")
    torch.compiler.reset()
    _compiled(step, 1.0)(*_batch(576))
    assert "its report is lost" in str(mstpass.reports()[-1])
    torch.compiler.reset()
    with pytest.raises(Exception, match="was not looked at: the graph came from a compile cache"):
        _compiled(step, "1GiB")(*_batch(576))


# ---- explain, and what torch leaves out --------------------------------------------------------
class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0]).logsumexp(-1).mean()


def test_explain_says_why_there_is_no_backward() -> None:
    weight = nn.Parameter(WEIGHT)
    for explain in (mstpass.explain, mstpass.explain_all):
        with pytest.raises(mstpass.ExplainError, match=f"no backward: {ITSELF}.*outside of it"):
            explain(_gradients, *_batch())
        with pytest.raises(mstpass.ExplainError, match="no backward: its results are detached"):
            explain(lambda w, x, y: _loss(w, x, y).detach(), weight, *_batch())


def test_an_rnn_that_torch_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Tagger(), torch.randn(2, 4, 8)
    with pytest.raises(mstpass.ExplainError, match="allow_rnn = True"):
        mstpass.explain(model, x)
    if torch.__version__ < (2, 15):
        with pytest.raises(mstpass.ExplainError, match="allow_rnn = True"):
            mstpass.explain_all(model, x)
    else:  # what comes after the call is a graph
        (rest,) = mstpass.explain_all(model, x)
        assert rest.peak_bytes
    for given in (model, lambda x: model(x)):
        with pytest.warns(UserWarning, match=r"an nn\.LSTM, torch\.compile leaves out the call"):
            mstpass.compile(given)
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    mstpass.compile(_Tagger())
    assert mstpass.explain(_Tagger(), x).peak_bytes
