"""Faults that a test's own process must not have, which ``test_faults_of_processes.py`` runs.

    python -m tests.fault_cases RESULT.json CASE...

Each case makes a fault, and checks that the gradients are right, or the error is clear, and that
the next step is right. The result is the traceback of each case that failed, by its name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F

import mstpass
from mstpass import backend, pipeline
from tests.checks import compiles_kernels, op_by_op

CASES: dict[str, Callable[[], None]] = {}
TOKENS, WIDTH, WORDS = 2048, 32, 2048
LABELS_N = torch.arange(TOKENS) % WORDS


def case(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = run
    return run


def loss(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.tanh() @ head.t(), LABELS_N)


def leaves() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, WIDTH).requires_grad_() for size in (TOKENS, WORDS)]


class Step:
    """A step that mst compiles when it is first called."""

    def __init__(self, **options: Any):
        torch.compiler.reset()
        given = {"chunk_tokens": 256, "memory_budget": 0.0, **options}
        self.compiled = torch.compile(loss, backend=backend.mst, options=given)

    def __call__(self) -> list[torch.Tensor]:
        inputs = leaves()
        return list(torch.autograd.grad(self.compiled(*inputs), inputs))

    def is_right(self) -> None:
        """One step has eager's gradients, loops, and no warning."""
        before = len(mstpass.reports())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = self()
        compare(found)
        assert all(len(report.regions) == 1 for report in mstpass.reports()[before:])


def compare(found: list[torch.Tensor]) -> None:
    inputs = leaves()
    expected = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def limited(what: int, size: int) -> Iterator[None]:
    """Within it, the process may have no more than so many bytes."""
    old, hard = resource.getrlimit(what)
    resource.setrlimit(what, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (old, hard))


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def tried(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What it returned, or the error that it raised."""
    try:
        return run(), None
    except Exception as error:
        return None, error


def is_of_memory(error: Exception | None) -> bool:
    return isinstance(error, MemoryError) or any(t in str(error) for t in ("alloc", "MemoryError"))


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "mstpass" in thread.name]


def nothing_is_left() -> None:
    """What a compilation changes for its own time is as it was."""
    assert gc.isenabled()
    assert not functorch_config.force_non_lazy_backward_lowering
    assert not our_threads(), threading.enumerate()


# ---- Ctrl-C --------------------------------------------------------------------------------------
@case
def interrupted_in_each_stage() -> None:
    lap = pipeline._Stopwatch.lap
    for stage in pipeline.STAGES:

        def interrupt(self: Any, name: str, stage: str = stage) -> None:
            if name == stage:
                signal.raise_signal(signal.SIGINT)
            lap(self, name)

        step = Step()
        pipeline._Stopwatch.lap = interrupt  # type: ignore[method-assign]
        try:
            step()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError(f"{stage} was not interrupted")
        finally:
            pipeline._Stopwatch.lap = lap  # type: ignore[method-assign]
        nothing_is_left()
        step.is_right()


@case
def interrupted_at_any_time() -> None:
    step, start = Step(), time.monotonic()
    step()
    seconds = time.monotonic() - start
    interrupted = 0
    for part in range(8):
        step = Step()
        alarm = threading.Timer((part + 0.5) / 8 * seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            alarm.start()
            step()
            alarm.join()
        except KeyboardInterrupt:
            interrupted += 1
        alarm.join()
        nothing_is_left()
        step.is_right()
    assert interrupted >= 4


@case
def a_solver_is_interrupted() -> None:
    def endless(problem: Any, budget_bytes: int | None) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    mstpass.register_solver("endless", endless)
    try:
        Step(solver="endless")()
    except KeyboardInterrupt:
        deadline = time.monotonic() + 10
        while our_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        nothing_is_left()
    else:
        raise AssertionError("nobody interrupted it")
    Step().is_right()


# ---- memory --------------------------------------------------------------------------------------
@case
def no_memory_while_compiling() -> None:
    """The step fails, or runs under Inductor or op by op; the next one is as ever."""
    failed = 0
    for extra_mib in (0, 1, 4, 16) if compiles_kernels() else (0, 4):
        step = Step()
        limit = address_space() + extra_mib * 2**20
        with limited(resource.RLIMIT_AS, limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, error = tried(step)
        if found is not None:
            compare(found)
        else:
            failed += 1
            assert is_of_memory(error), error
        del error
        torch.compiler.reset()
        step = Step()
        step.is_right()
    assert failed


@case
def no_memory_while_running() -> None:
    step = Step()
    step.is_right()
    for _ in range(2):
        with limited(resource.RLIMIT_AS, address_space()):
            found, error = tried(step)
        assert found is None and is_of_memory(error), error
        del error
        step.is_right()


@case
def a_leaner_plan_where_memory_is_short() -> None:
    """The forward fails for want of memory, and runs again in shorter chunks."""
    labels = torch.arange(TOKENS)

    def wide(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.tanh() @ head.t(), labels)

    torch.manual_seed(0)
    inputs = [torch.randn(size, WIDTH).requires_grad_() for size in (TOKENS, 8 * WORDS)]
    expected = torch.autograd.grad(wide(*inputs), inputs)
    torch.compiler.reset()
    step = torch.compile(wide, backend=backend.mst)
    told: list[str] = []
    for part in (None, 0.9, 0.7, 0.5, 0.3, None):
        peak = mstpass.reports()[-1].peak_bytes if part else 0
        limit = address_space() + int(part * (peak or 0)) if part else resource.RLIM_INFINITY
        with limited(resource.RLIMIT_AS, limit), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, error = tried(lambda: torch.autograd.grad(step(*inputs), inputs))
        told += [str(w.message) for w in caught if "leaner plan" in str(w.message)]
        assert error is None or is_of_memory(error), error
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        del found, error
    assert len(told) == 1 and "Set memory_budget=" in told[0], told


# ---- disk ----------------------------------------------------------------------------------------
@case
def no_room_for_reports() -> None:
    """A limit on the size of files fails as a full disk does."""
    path = Path(os.environ["MSTPASS_COSTS"]).with_name("report.json")
    step = Step(report=str(path))
    with limited(resource.RLIMIT_FSIZE, 1000), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step()
    compare(found)
    (told,) = [text for w in caught if "mstpass" in (text := str(w.message))]
    assert "cannot write report=" in told and "File too large" in told, told
    assert not path.exists() and not list(path.parent.rglob("*.tmp"))
    torch.compiler.reset()
    Step(report=str(path)).is_right()
    assert mstpass.Report.from_json(path).regions


@case
def a_home_that_cannot_be_written() -> None:
    """Nor can root write to /proc. Costs are looked up, and not found."""
    from mstpass.errors import UserError
    from mstpass.graph import device_costs

    names = ("HOME", "XDG_CACHE_HOME", "MSTPASS_COSTS")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        for home in ("/proc", None):
            if home is not None:
                os.environ["HOME"] = home
            else:
                os.environ.pop("HOME", None)
            Step().is_right()
            cpu = torch.device("cpu")
            table = device_costs._CPU
            if home is not None:
                _, error = tried(functools.partial(device_costs.store, cpu, table))
                assert isinstance(error, UserError) and "MSTPASS_COSTS" in str(error)
    finally:
        os.environ.update(before)


@case
def processes_that_write_at_once() -> None:
    """Each finds a whole file at any time, and no report takes the place of another one."""
    from mstpass.graph import device_costs
    from mstpass.report import store

    Step().is_right()
    report, cpu = mstpass.reports()[-1], torch.device("cpu")
    folder = Path(os.environ["MSTPASS_COSTS"]).parent / "shared"
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException), warnings.catch_warnings():
                warnings.simplefilter("error")
                for number in range(20):
                    device_costs.store(cpu, device_costs._CPU)
                    store.remember(report, "shared")
                    assert store.recall("shared") is not None
                    if number % 5 == 0:
                        store.write(report, str(folder / "report.json"))
                code = 0
            os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    paths = list(folder.iterdir())
    assert len(paths) == 16
    assert all(mstpass.Report.from_json(path).outcome == report.outcome for path in paths)
    device_costs._stored.cache_clear()
    assert device_costs.costs_of(cpu) == device_costs._cpu_costs(
        device_costs._CPU, torch.get_num_threads()
    )
    Path(os.environ["MSTPASS_COSTS"]).unlink()
    device_costs._stored.cache_clear()


# ---- processes -----------------------------------------------------------------------------------
class Gradients(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Each item is the gradient of a step that the worker itself compiles.

    Built for CUDA, torch has threads for gradients, which a fork loses: there no step has a
    backward, and items are empty.
    """

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        if not _gradients_work():
            return torch.empty(0)
        with op_by_op():
            return torch.cat([gradient.flatten() for gradient in Step()()])


def _gradients_work() -> bool:
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        return False
    return True


def _workers(method: str) -> None:
    step = Step()
    step.is_right()
    loader = torch.utils.data.DataLoader(
        Gradients(), batch_size=None, num_workers=1, multiprocessing_context=method, timeout=300
    )
    expected = torch.cat([gradient.flatten() for gradient in step()])
    for found in loader:
        if method == "fork" and torch.version.cuda and not found.numel():
            continue
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        step.is_right()


@case
def workers_that_are_forked() -> None:
    _workers("fork")


@case
def workers_that_are_spawned() -> None:
    _workers("spawn")


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    result, *names = sys.argv[1:]
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    with op_by_op():
        for name in names:
            start = time.monotonic()
            try:
                CASES[name]()
            except BaseException:
                failed[name] = traceback.format_exc()
            seconds[name] = time.monotonic() - start
            Path(result).write_text(json.dumps({"failed": failed, "seconds": seconds}))


if __name__ == "__main__":
    main()
