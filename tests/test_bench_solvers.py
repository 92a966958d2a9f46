"""`mstpass bench solvers` and `bench record`: figures, files, and a user's own solver."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass.bench import problems, record, solvers
from mstpass.bench.results import Target
from mstpass.errors import UserError
from mstpass.partition.solvers import SOLVERS
from mstpass.problem.problem import CutProblem, Plan
from mstpass.problem.solver_registry import registered


@pytest.fixture
def own_solvers() -> Iterator[None]:
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


def test_from_problems_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, plots, text = tmp_path / "new" / "s.csv", tmp_path / "plots", tmp_path / "s.md"
    argv = ["--problem", "mlps-1", "--problem", "head", "--quick", "--device", "cpu"]
    files = ["--csv", str(table), "--plots", str(plots), "--markdown", str(text)]
    assert solvers.main([*argv, *files]) == 0
    assert "peak_search, budget by budget" in capsys.readouterr().out
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(SOLVERS)
    assert {row["solver"] for row in rows} == set(SOLVERS)
    for row in rows:
        within = int(row["peak_bytes"]) <= int(row["budget_bytes"])
        assert row["within"] == str(within)
        assert not within or float(row["us"]) >= float(row["bound_us"]) * (1 - 1e-5)
    assert {path.name for path in plots.iterdir()} == {"mlps-1.png", "head.png"}
    assert all(path.stat().st_size > 10_000 for path in plots.iterdir())
    assert "| mlps-1 | 1.00 |" in text.read_text(encoding="utf-8")


def _auto_row(name: str, share: float, proof_s: float) -> solvers.Row:
    rows = solvers.rows_of(name, problems.load(name), shares=(share,), proof_s=proof_s)
    (row,) = (row for row in rows if row.solver == "peak_search")
    return row


@pytest.mark.parametrize(("name", "share"), [("head", 1.0), ("mlps-1", 1.0), ("mlps-1", 0.0)])
def test_auto_takes_the_least_time_where_that_is_proven(name: str, share: float) -> None:
    row = _auto_row(name, share, proof_s=120.0)  # a proof takes seconds, and ends there
    assert row.gap == pytest.approx(0.0, abs=1e-5), row


@pytest.mark.parametrize(
    ("name", "share", "most"), [("head", 0.5, 0.08), ("mlps-1", 0.75, 0.25), ("mlps-1", 0.25, 0.15)]
)
def test_auto_is_near_what_no_plan_is_below(name: str, share: float, most: float) -> None:
    """Plans above a budget are excluded one by one, which proves no optimum here, but a bound."""
    row = _auto_row(name, share, proof_s=3.0)
    assert row.within and row.bound_us * (1 - 1e-5) <= row.us <= (1 + most) * row.bound_us, row


def test_a_broken_solver_does_not_end_the_bench(own_solvers: None) -> None:
    def broken(problem: CutProblem, budget_bytes: int | None) -> Plan:
        raise RuntimeError("no such luck")

    def careless(problem: CutProblem, budget_bytes: int | None) -> Plan:
        return Plan(SOLVERS["min_cut"](problem, None).saved | {"nothing of this name"})

    def lost(problem: CutProblem, budget_bytes: int | None) -> Plan:
        return Plan(SOLVERS["min_cut"](problem, None).saved, {"no region": "fused"})

    for name, solve in (("broken", broken), ("careless", careless), ("lost", lost)):
        mstpass.register_solver(name, solve)
    rows = solvers.rows_of("head", problems.load("head"), shares=(1.0,), proof_s=1.0)
    errors = {row.solver: row.error for row in rows if row.error}
    assert errors["broken"] == "RuntimeError: no such luck"
    assert "nothing of this name" in errors["careless"]
    assert "no region" in errors["lost"]
    assert not any(row.within for row in rows if row.error)
    assert len(errors) == 3


@pytest.mark.parametrize("name", ["auto", "min_cut", "no identifier"])
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueError, match="register_solver"):
        mstpass.register_solver(name, lambda problem, budget: Plan(frozenset()))


def test_a_solver_of_another_signature_is_refused(own_solvers: None) -> None:
    with pytest.raises(TypeError, match="budget_bytes"):
        mstpass.register_solver("short", lambda problem: Plan(frozenset()))  # type: ignore[arg-type]


def test_rows_without_a_proof_have_no_gap() -> None:
    row = solvers.Row("p", 1.0, 10, "s", 1, 9, 110.0, 0.0, 0.1, 100.0, None)
    assert row.within and row.gap is None
    proven = solvers.Row("p", 1.0, 10, "s", 1, 9, 110.0, 0.0, 0.1, 100.0, 100.0)
    assert proven.gap == pytest.approx(0.1)
    over = solvers.Row("p", 1.0, 10, "s", 1, 11, 90.0, 0.0, 0.1, 100.0, 100.0)
    assert not over.within and over.gap is None


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces silu as other ops")
def test_recording_runs_nothing_and_finds_the_shipped_problem(tmp_path: Path) -> None:
    """Weights of 24 GiB are traced in the memory of their graph."""
    assert record.main(["mlps-1", "--out", str(tmp_path)]) == 0
    again = CutProblem.from_json(problems.path_of("mlps-1", tmp_path))
    shipped = problems.load("mlps-1")
    assert [v.name for v in again.values] == [v.name for v in shipped.values]
    assert [v.bytes for v in again.backward] == [v.bytes for v in shipped.backward]
    large = record.record(record.recorded(record._mlps, 2**12, 2**14, 2**14, layers=8))
    assert sum(v.bytes for v in large.values if v.free) > 24 * 2**30


def test_what_cannot_be_recorded() -> None:
    with pytest.raises(UserError, match="'llama-9' is unknown; choose from"):
        record.main(["llama-9"])
    with pytest.raises(UserError, match="no backward"):
        record.problem_of(lambda x: F.relu(x), torch.zeros(4))


def test_targets_are_of_proven_optima() -> None:
    rows = [
        solvers.Row("p", share, 10, "peak_search", 1, 9, us, 0.0, 0.1, 100.0, proven)
        for share, us, proven in ((1.0, 101.0, 100.0), (0.5, 150.0, None))
    ]
    result = solvers._result(rows, ["p"], 1.0)
    (target,) = result.targets
    assert isinstance(target, Target)
    assert math.isclose(target.value or 0.0, 1.01)
    assert any("proves 1 of 2 optima" in note for note in result.notes)
