"""Problems as JSON: nothing is lost, what is no problem is refused, and no torch is needed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from mstpass.bench import problems
from mstpass.errors import UserError
from mstpass.problem.problem import CutProblem, Value
from mstpass.problem.problem_json import ProblemFileError
from tests.problems import steps

SMALL = CutProblem((Value("x", 4, free=True), Value("y", 8, ("x",), needed=True)))


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
@given(problem=steps(forward=9, backward=9))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(name: str, problem: CutProblem, tmp_path: Path) -> None:
    path = tmp_path / name
    problem.to_json(path)
    assert CutProblem.from_json(path) == problem
    first = path.read_bytes()
    problem.to_json(path)
    assert path.read_bytes() == first


def test_defaults_are_left_out(tmp_path: Path) -> None:
    SMALL.to_json(tmp_path / "p.json")
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["values"][0] == {"name": "x", "bytes": 4, "free": True}
    assert "regions" not in record


def _record(**changes: object) -> bytes:
    record = {"format": "mstpass cut problem", "version": 4, "values": [{"name": "x", "bytes": 4}]}
    return json.dumps({**record, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x01", "not JSON"),
        (gzip.compress(_record(), mtime=0)[:-9], "not JSON"),
        (b"[1, 2]", "not a cut problem"),
        (b"{}", "not a cut problem"),
        (_record(version=2), "version 2; this mstpass reads 4"),
        (_record(values=[{"name": "x", "bytes": "four"}]), "expected int, got 'four'"),
        (_record(values=[{"name": "x", "bytes": True}]), "expected int, got True"),
        (_record(values=[{"name": "x", "bytes": 4, "color": 1}]), "Value has no field 'color'"),
        (_record(values=[{"name": "x"}]), "bytes"),
        (_record(values="x"), "expected a list"),
        (_record(values=["x"]), "expected an object with the fields of Value"),
        (_record(values=[{"name": "x", "bytes": 4, "inputs": ["y"]}]), "do not come before it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_problem_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(ProblemFileError, match=message) as error:
        CutProblem.from_json(path)
    assert str(path) in str(error.value)


def test_recorded_problems_load_and_are_planned_without_torch() -> None:
    """In a process of its own: here torch is imported already."""
    code = (
        "import sys, mstpass; from mstpass.bench import problems;"
        "from mstpass.partition.solvers import SOLVERS;"
        "from mstpass.problem import apply_modes, problem_json, saved_set;"
        "from mstpass.memory import simulate_plan;"
        "assert SOLVERS['peak_search'](problems.load('mlps-1'), 0).saved is not None;"
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_at_least_twelve_models_are_recorded() -> None:
    names = problems.names()
    assert len(names) >= 12
    assert {"llama-8", "llama-16", "llama-32", "llama-64"} <= set(names)
    total = sum(problems.path_of(name).stat().st_size for name in names)
    assert total < 1.5 * 2**20
    for name in names[:3]:
        problem = problems.load(name)
        assert problem.backward and problem.gradients and problem.regions


def test_an_unknown_problem_names_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"'llama-9' is unknown; choose from: .*llama-8"):
        problems.load("llama-9")
