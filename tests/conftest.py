from __future__ import annotations

import gc
import json
import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import fx

from mstpass import fewer_loops, pipeline
from mstpass.frame_stack import with_deep_stack
from mstpass.fuzz.plans import broken_limits
from mstpass.options import Options
from mstpass.passes import runner
from mstpass.problem.solver_registry import registered
from tests import checks
from tests.html_page import browser, open_page  # noqa: F401
from tests.mixed_solver import mixed_wherever_possible
from tests.planner_models import TINY

_CACHE = pytest.StashKey[str]()
# The beginnings of files whose tests are marked `lab`: of what stands beside the compiler.
_LAB = (
    *("test_bench_", "test_cli_plan", "test_demo"),
    *("test_fuzz.", "test_fuzz_peaks", "test_planner"),
)

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="tests marked `full` too, and every step of every test under Inductor: hours",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Every run compiles afresh: a warm cache on disk skips the passes, and their warnings.

    The workers of a run share a cache, as the tests of a worker do.

    What was measured on this machine changes no test either, nor does its number of cores: an
    attention's workspace grows with the threads, and plans with it.
    """
    torch.set_num_threads(2)
    if config.getoption("--all"):
        os.environ[checks.KERNELS] = "1"
    else:  # the random examples of a property are the same in every run
        slow = [hypothesis.HealthCheck.too_slow]  # to make examples, on a busy machine
        hypothesis.settings.register_profile(
            "same examples", derandomize=True, suppress_health_check=slow
        )
        hypothesis.settings.load_profile("same examples")
    if hasattr(config, "workerinput"):  # a worker has the environment of the process that began
        return
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="mstpass-tests-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.stash[_CACHE]
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # an empty cache would try the vector units: 10 s
    os.environ["MSTPASS_COSTS"] = os.path.join(config.stash[_CACHE], "none.json")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which the marks select no test is not imported: to import all takes seconds."""
    marks, name = str(config.getoption("markexpr")), collection_path.name
    if not name.startswith("test_"):
        return None
    if marks.startswith("dry_run") and not torch.cuda.is_available():  # tests for CUDA would skip
        return "dry_run" not in collection_path.read_text(encoding="utf-8") or None
    if marks.startswith(("lab", "not lab")):
        return name.startswith(_LAB) is not marks.startswith("lab") or None
    return None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests run first: at the end of a run no worker then waits for another one's."""
    for item in items:
        if item.path.name.startswith(_LAB):
            item.add_marker("lab")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not config.getoption("--all"):
        skip = pytest.mark.skip(reason="runs with --all")
        left_out = _not_sampled(items)
        for item in items:
            if item.get_closest_marker("full") or item in left_out:
                item.add_marker(skip)


def _not_sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of tests marked `sampled`, the parameters that run with ``--all`` only.

    Those that run are spread evenly over the list of parameters, its ends included.
    """
    families = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("full"):
            families[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for family in families.values():
        mark = family[0].get_closest_marker("sampled")
        assert mark is not None
        last, number = len(family) - 1, mark.args[0]
        kept = {round(each * last / max(1, number - 1)) for each in range(number)}
        left_out |= {item for place, item in enumerate(family) if place not in kept}
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Every test runs with room for its frames: compilations are deep."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    found = with_deep_stack(pyfuncitem.obj, **arguments)
    assert found is None, "a test that returns something was meant to assert it"
    return True


@pytest.fixture(scope="session", autouse=True)
def forced_loops_stay() -> Iterator[None]:
    """Tests force loops with ``chunk_tokens`` on steps so small that loops may raise the peak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fewer_loops, "FORCED_MAY_RAISE", math.inf)
        yield


@pytest.fixture(scope="session", autouse=True)
def every_pass_is_verified() -> Iterator[None]:
    """A pass that leaves wrong metadata, order or phases behind fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "LEAST", runner.RAISE)
        yield


@pytest.fixture(scope="session", autouse=True)
def every_plan_keeps_its_promises() -> Iterator[None]:
    """No plan of any test is above Inductor alone, and no free plan takes more than its time."""
    run = pipeline.run

    def checked(
        module: fx.GraphModule, options: Options | None = None, **more: Any
    ) -> pipeline.Result:
        options = options or Options()
        result = run(module, options, **more)
        outcome = result.outcome
        forced = options.chunk_tokens is not None or any(r.unbounded for r in outcome.regions)
        copied = outcome.save_plan is not None and outcome.save_plan.transfers  # a policy may ask
        if not forced and not copied and not outcome.left_to_torch:
            broken = [str(b) for b in broken_limits(outcome, options, more.get("limit"))]
            assert not broken, broken
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", checked)
        yield


@pytest.fixture(scope="module", autouse=True)
def _older_objects_stay() -> None:
    """What was there before a file's tests is not looked through again at every collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _op_by_op(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `op_by_op` compile no kernels, but with ``--all``."""
    marks = {mark.name for mark in request.node.iter_markers()}
    if "op_by_op" in marks and not marks & {"kernels", "cuda"}:
        with checks.op_by_op():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny Llama's ``config.json``."""
    path = tmp_path_factory.mktemp("planner") / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return str(path)


@pytest.fixture
def mixed_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver "mixed" that has regions in mixed mode wherever that is offered."""
    monkeypatch.setitem(registered, "mixed", mixed_wherever_possible)


@pytest.fixture
def one_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products share a workspace, as before torch 2.15: it is as large as a tiny model."""
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
