"""Whatever fails inside of mstpass, the step's gradients are right; the fault is told once.

docs/faults.md is the table of all faults. The parameters are the real names of the pipeline's
stages, and of every function that the backend is made of, so that new ones are tested as they come.
"""

from __future__ import annotations

import inspect
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass import backend, inductor_hooks, pipeline, pipeline_stages
from mstpass.report import store
from tests.checks import KERNELS, op_by_op

pytestmark = pytest.mark.sampled(5)

Patch = pytest.MonkeyPatch

LABELS_N = torch.arange(256)


def loss(x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """An MLP, whose loops recompute, and a head, whose loop is fused."""
    return F.cross_entropy(F.gelu(x @ up) @ up.t() @ up.repeat(1, 8), LABELS_N)


def gradients(step: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    leaves = [(torch.randn(*size) / 4).requires_grad_() for size in ((256, 16), (16, 96))]
    return list(torch.autograd.grad(step(*leaves), leaves))


def told_by_a_right_step(**options: Any) -> list[str]:
    """Compile the step and hold its gradients to eager's. Returns what mstpass warned of."""
    torch.compiler.reset()
    given = {"chunk_tokens": 64, "memory_budget": 0.0, **options}
    step = torch.compile(loss, backend=backend.mst, options=given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(step)
    torch.testing.assert_close(found, gradients(loss), rtol=1e-4, atol=1e-7)
    return [text for w in caught if "mstpass" in (text := str(w.message))]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.delenv(KERNELS, raising=False)  # nothing here depends on what Inductor makes of it
    with op_by_op():
        yield


# ---- an exception in any stage -------------------------------------------------------------------
@pytest.mark.parametrize("stage", pipeline.STAGES)
def test_an_exception_in_a_stage(stage: str, monkeypatch: Patch) -> None:
    lap = pipeline._Stopwatch.lap

    def broken(self: Any, name: str) -> None:
        if name == stage:
            raise ZeroDivisionError("on purpose")
        lap(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline._Stopwatch, "lap", broken)
        (told,) = told_by_a_right_step()
        assert "ZeroDivisionError: on purpose" in told
        assert "on purpose" in str(mstpass.reports()[-1]) and not mstpass.reports()[-1].regions
        with pytest.raises(Exception, match="on purpose"):
            told_by_a_right_step(strict=True)
    assert told_by_a_right_step() == [], "the next compilation is as ever"
    assert len(mstpass.reports()[-1].regions) == 2


# what reads options, tells of a fault, or compiles without mstpass: nothing could take their place
_LAST_RESORT = {
    *("mst", "_compile", "_drop", "warn_of", "failed", "torch_changed", "switch_off", "why_off"),
    *("by_inductor_alone", "options_of_mode", "Options", "warn_if_newer", "keep", "publish"),
}
_MODULES = (backend, inductor_hooks, pipeline, pipeline_stages, store)


def _is_a_part(name: str, value: Any) -> bool:
    if not (inspect.isfunction(value) or inspect.isclass(value)) or name in _LAST_RESORT:
        return False
    if inspect.isclass(value) and issubclass(value, BaseException):
        return False
    return value.__module__.startswith("mstpass.")


PARTS = [
    pytest.param(module, name, id=f"{module.__name__.removeprefix('mstpass.')}.{name}")
    for module in _MODULES
    for name, value in vars(module).items()
    if _is_a_part(name, value)
]


@pytest.mark.full
@pytest.mark.parametrize(("module", "name"), PARTS)
def test_an_exception_in_any_function(module: ModuleType, name: str, monkeypatch: Patch) -> None:
    raised: list[str] = []
    is_class = inspect.isclass(getattr(module, name))  # whose methods are missed as well

    def broken(*_: Any, **__: Any) -> None:
        raised.append(name)
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(module, name, broken)
    told = told_by_a_right_step()
    assert len([text for text in told if "mstpass failed on a graph" in text]) <= 1, told
    assert is_class or all("on purpose" in text for text in told), told
    if not raised:
        return
    torch.compiler.reset()
    monkeypatch.undo()
    assert told_by_a_right_step() == []


# ---- what cannot be written ----------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/proc/none/report.json", "{file}/report.json", "a\0b", "/"])
def test_a_report_that_cannot_be_written(path: str, tmp_path: Path) -> None:
    """Nobody can write to /proc, root included."""
    (tmp_path / "file").touch()
    path = path.format(file=tmp_path / "file")
    (told,) = told_by_a_right_step(report=path)
    assert f"mstpass cannot write report={path!r}" in told
    assert mstpass.reports()[-1].regions, "the step keeps its loops"
    with pytest.raises(Exception, match="cannot write report="):
        told_by_a_right_step(report=path, strict=True)


def test_reports_keep_the_files_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("the user's")
    path = tmp_path / "report.json"
    assert [told_by_a_right_step(report=str(path)) for _ in range(2)] == [[], []]
    assert path.read_text() == "the user's"
    for name in ("report-2.json", "report-3.json"):
        assert mstpass.Report.from_json(tmp_path / name).regions


def test_a_cache_that_cannot_be_written(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "cache_folder", lambda: Path("/proc/none"))
    assert told_by_a_right_step() == [] and mstpass.reports()[-1].regions
    (message,) = [record.message for record in caplog.records if "mstpass" in record.name]
    assert "could not write a report beside the compile cache" in message


# ---- a clock that jumps --------------------------------------------------------------------------
def test_a_clock_that_jumps(monkeypatch: Patch) -> None:
    """By years, back and forth: a plan depends on no clock."""
    assert told_by_a_right_step() == []
    expected = mstpass.reports()[-1]
    jumps = random.Random(0)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: jumps.uniform(-1e9, 1e9))
    assert told_by_a_right_step() == []
    found = mstpass.reports()[-1]
    assert found.outcome == expected.outcome and found.details == expected.details
