"""Threads that compile at once, with mst and without: each gets what it would get alone."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor.scheduler import SchedulerNode

import mstpass
from mstpass import inductor_hooks, pipeline
from mstpass.backend import mst
from mstpass.gpus import gpu
from mstpass.torch_internals.pretended_gpu import pretended_gpu
from tests import checks

THREADS = 4
# docs/versions.md says what is known of the crashes.
at_once = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="on torch 2.11 threads that compile at once may crash"
)


def _step(thread: int) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """A step of its own shape, and its leaves."""
    generator = torch.Generator().manual_seed(thread)
    tokens, words = 256 + 64 * thread, 512 + 128 * thread
    sizes = ((tokens, 16), (16, 96), (words, 16))
    leaves = [(torch.randn(*size, generator=generator) / 4).requires_grad_() for size in sizes]
    labels = torch.arange(tokens) % words

    def loss(x: torch.Tensor, up: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x + F.gelu(x @ up) @ up.t()) @ head.t(), labels)

    return loss, leaves


def _same_as_eager(step: Callable[..., torch.Tensor], thread: int) -> None:
    loss, leaves = _step(thread)
    found = torch.autograd.grad(step(*leaves), leaves)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def _in_threads(run: Callable[[int], None], threads: int = THREADS) -> None:
    start = threading.Barrier(threads)

    def started(thread: int) -> None:
        start.wait(60)
        run(thread)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(started, thread) for thread in range(threads)]:
            future.result(timeout=600)


def _state() -> tuple[Any, ...]:
    """What of torch's, and of the process, a compilation might leave changed."""
    settings = ("custom_partitioner_fn", "_pre_fusion_custom_pass", "_post_fusion_custom_pass")
    return (
        SchedulerNode.recompute_size_and_body,
        functorch_config.force_non_lazy_backward_lowering,
        *(getattr(inductor_config, name) for name in settings),
        inductor_config.post_grad_custom_post_pass,
        inductor_config.allow_buffer_reuse,
        gc.isenabled(),
    )


class _Forward:
    """Runs a graph in any number of threads at once; an interpreter would run it in one."""

    def __init__(self, gm: torch.fx.GraphModule):
        self.gm = gm

    def boxed_run(self, inputs: list[Any]) -> Any:
        args = tuple(inputs)
        inputs.clear()
        return self.gm(*args)


@contextlib.contextmanager
def _kernels(compiled: bool) -> Iterator[None]:
    in_threads = mock.patch.object(checks, "Seeded", _Forward)
    with in_threads, contextlib.nullcontext() if compiled else checks.op_by_op():
        yield


@at_once
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.full)])
def test_threads_with_mst_and_without(kernels: bool) -> None:
    before, reports = _state(), len(mstpass.reports())
    seen: list[Any] = []

    def run(thread: int) -> None:
        backend: Any = mst if thread % 2 else "inductor"
        given = {"options": {"chunk_tokens": 64, "memory_budget": 0.0}} if thread % 2 else {}
        step = torch.compile(_step(thread)[0], backend=backend, **given)
        for _ in range(2):
            _same_as_eager(step, thread)
        seen.append(_state())

    with _kernels(kernels), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _in_threads(run)
    assert [str(w.message) for w in caught if "mstpass" in str(w.message)] == []
    assert _state() == before
    new = mstpass.reports()[reports:]
    assert len(new) == THREADS // 2 and all(report.regions for report in new)
    assert before in seen, "the last thread is done when nothing else is compiled"


def _methods() -> dict[tuple[str, str, str], Any]:
    """The functions of torch's modules and of their classes, by their names."""
    found: dict[tuple[str, str, str], Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torch":
            continue
        for name, value in list(vars(module).items()):
            if type(value) is types.FunctionType:
                found[module_name, "", name] = value
            elif issubclass(type(value), type) and value.__module__ == module_name:
                methods = [(n, m) for n, m in list(vars(value).items()) if type(m) in _METHODS]
                found |= {(module_name, name, n): m for n, m in methods}
    del found["torch.fx.graph_module", "", "_forward_from_src"]  # torch sets it for each graph
    return found


_METHODS = (types.FunctionType, property, staticmethod, classmethod)


@at_once
def test_nothing_of_torch_is_patched_while_mst_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread compiles meanwhile, with Dynamo or without, it compiles as ever."""
    inside, seen = threading.Semaphore(0), threading.Semaphore(0)
    lap, lower = pipeline._Stopwatch.lap, inductor_hooks.lower_loops

    def pause() -> None:
        inside.release()
        assert seen.acquire(timeout=60)

    def paused_lap(self: Any, name: str) -> None:
        pause()
        lap(self, name)

    def paused_lower(graph: Any) -> Any:
        pause()
        return lower(graph)

    def run(thread: int) -> None:
        step = torch.compile(_step(thread)[0], backend=mst, options={"chunk_tokens": 64})
        _same_as_eager(step, thread)

    with _kernels(False):
        run(1)  # what is imported when it is first needed is there now
        before, state = _methods(), _state()
        assert len(before) > 10_000
        monkeypatch.setattr(pipeline._Stopwatch, "lap", paused_lap)
        monkeypatch.setattr(inductor_hooks, "lower_loops", paused_lower)
        with ThreadPoolExecutor(1) as pool:
            future, pauses = pool.submit(run, 2), 0
            while not future.done():
                if inside.acquire(timeout=0.05):
                    pauses += 1
                    now = _methods()
                    changed = [name for name in before if now.get(name) is not before[name]]
                    settings = _state()[:-1] == state[:-1]  # but for the garbage collector
                    seen.release()
                    assert changed == []
                    assert settings or torch.__version__ < "2.12"  # where threads share them
            future.result()
        assert pauses >= len(pipeline.STAGES) + 2  # forward and backward are lowered


@at_once
def test_threads_compile_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    with _kernels(False):
        step = torch.compile(_step(0)[0], backend=mst, options={"chunk_tokens": 64})
        _in_threads(lambda _: _same_as_eager(step, 0))


LOOKUP = """
import threading, torch
assert "torch._dynamo.backends.registry" not in __import__("sys").modules
start, errors = threading.Barrier(8), []

def look_up():
    start.wait()
    try:
        torch.compile(torch.sin, backend="mst")
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=look_up) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
from mstpass.entry_point import mst
from torch._dynamo.backends.registry import list_backends, lookup_backend
assert lookup_backend("mst") is mst and "mst" in list_backends()
"""


@at_once
def test_a_pretended_gpu_is_seen_by_its_own_thread_alone() -> None:
    """Another thread seeds, asks and compiles as on the machine that there is."""
    pretended, asked = threading.Event(), threading.Event()
    found: list[Any] = []

    def explain() -> None:
        with pretended_gpu(gpu("h100")):
            found.append((torch.cuda.is_available(), torch.cuda.get_device_name()))
            pretended.set()
            asked.wait(60)
            found.append(torch.cuda.get_device_capability())

    real = (torch.cuda.is_available(), torch.cuda.device_count())
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(explain)
        try:
            assert pretended.wait(60)
            assert (torch.cuda.is_available(), torch.cuda.device_count()) == real
            torch.manual_seed(0)  # seeds all GPUs that there are
            with _kernels(False):
                _same_as_eager(torch.compile(_step(1)[0], backend=mst), 1)
        finally:
            asked.set()
        future.result()
    assert found == [(True, gpu("h100").full_name), (9, 0)]
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == real


INSTALLED = any(e.name == "mstpass" for e in entry_points(group="torch.backends"))
ALONE = pytest.param("", marks=pytest.mark.skipif(not INSTALLED, reason="mstpass is not installed"))


@pytest.mark.parametrize("first", [ALONE, pytest.param("import mstpass", marks=pytest.mark.full)])
def test_threads_that_look_up_the_name_at_once(first: str) -> None:
    """torch registers an entry point when it is first looked up: all threads that do so at once."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", f"{first}\n{LOOKUP}"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
