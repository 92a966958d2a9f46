"""A torch that renames a hook, calls it otherwise or no longer calls it costs the loops, no more.

Each test changes the installed torch as a new version might. The gradients stay right, one warning
says what torch no longer does, and ``strict=True`` raises it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.aot_autograd as aot_autograd
import torch._functorch.config as functorch_config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.post_grad as post_grad
import torch._inductor.lowering as lowering
import torch._inductor.scheduler as scheduler
import torch.nn.functional as F
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.scheduler import SchedulerNode

import mstpass
from mstpass import backend, entry_point, hook_checks
from mstpass.torch_internals.inductor import CustomSchedulerPass

Patch = pytest.MonkeyPatch
_READERS = {  # the modules that look up a hook
    "custom_partitioner_fn": compile_fx,
    "post_grad_custom_post_pass": post_grad,
    "_pre_fusion_custom_pass": scheduler,
    "_post_fusion_custom_pass": scheduler,
    "force_non_lazy_backward_lowering": aot_autograd,
}


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.full)])
def fallback(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """What falls back runs in eager mode, without a C++ compiler; with --all by Inductor, too."""
    if request.param == "eager":
        for module in (backend, entry_point):
            monkeypatch.setattr(module, "by_inductor_alone", lambda gm, inputs, users: gm.forward)
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def _on_again() -> Iterator[None]:
    """mstpass is on before each test, and warns again. Keys of caches would have a hook's name."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
    _forget_settings()
    hook_checks._warn_unread.cache_clear()
    entry_point._warn_once.cache_clear()


class _Without:
    """torch's settings as a module sees them that knows one of them no more."""

    def __init__(self, config: Any, name: str):
        self._config, self._name = config, name

    def __getattr__(self, name: str) -> Any:
        return None if name == self._name else getattr(self._config, name)


def _ignored(patch: Patch, hook: str) -> None:
    module = _READERS[hook]
    patch.setattr(module, "config", _Without(module.config, hook))


def _renamed(patch: Patch, hook: str) -> None:
    _ignored(patch, hook)
    patch.delitem(inductor_config._config, hook)
    _forget_settings()


def _forget_settings() -> None:
    """torch keeps a copy of its settings, and from 2.13 on what has changed since."""
    changed = getattr(inductor_config, "_get_dict_dirty_keys_var", None)
    if changed is not None:
        changed.set(None)


class _Head(nn.Module):
    """The loss of an LM head, whose one loop is in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(x)) % 1024
        return F.cross_entropy(self.head(x), labels)


class _MLP(nn.Module):
    """Its loops recompute in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def _gradients(model: nn.Module, step: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(256, 16, requires_grad=True)
    model.zero_grad()
    step(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def _run(model: nn.Module, **options: Any) -> list[str]:
    """Compile and hold gradients to eager's. Returns what mstpass warned of."""
    torch.compiler.reset()
    step = torch.compile(model, backend=backend.mst, options={"chunk_tokens": 64, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _gradients(model, step)
    for ours, eagers in zip(found, _gradients(model, model), strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-7)
    return [text for w in caught if "mstpass" in (text := str(w.message))]


def _has_loops() -> bool:
    return bool(mstpass.reports()[-1].regions)


def _falls_back(model: nn.Module, warning: str, **options: Any) -> None:
    """The step compiles as under Inductor, with one warning."""
    (told,) = _run(model, **options)
    assert "mstpass failed on a graph" in told and warning in told, told
    assert not _has_loops()
    assert warning in str(mstpass.reports()[-1].rejections)


def _strict_raises(model: nn.Module, warning: str, **options: Any) -> None:
    with pytest.raises(Exception, match=warning):
        _run(model, strict=True, **options)


def _with_joint_pass(partition: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function around partitioners, with ``partition`` in the place of ours."""
    around = compile_fx.partition_fn

    def partition_fn(gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        ours = inductor_config.custom_partitioner_fn

        class Changed(compile_fx.CustomPartitionerFn):  # type: ignore[name-defined, misc]
            def __call__(self, *args: Any, **given: Any) -> Any:
                return partition(ours, *args, **given)

            def uuid(self) -> None:
                return None

        if ours is None:
            return around(gm, joint_inputs, **kwargs)
        with inductor_config.patch(custom_partitioner_fn=Changed()):
            return around(gm, joint_inputs, **kwargs)

    return partition_fn


# ---- the partitioner -----------------------------------------------------------------------------
def test_the_partitioner_is_not_called(fallback: None, monkeypatch: Patch) -> None:
    _ignored(monkeypatch, "custom_partitioner_fn")
    _falls_back(_Head(), "custom_partitioner_fn is not called")
    _strict_raises(_Head(), "custom_partitioner_fn is not called")


def test_the_partitioner_is_renamed(fallback: None, monkeypatch: Patch) -> None:
    _renamed(monkeypatch, "custom_partitioner_fn")
    _falls_back(_Head(), "custom_partitioner_fn does not exist")


@pytest.mark.parametrize("change", ["positional", "unnamed"])
def test_the_partitioner_gets_other_arguments(
    fallback: None, monkeypatch: Patch, change: str
) -> None:
    def called(ours: Any, *args: Any, num_fwd_outputs: int, **kwargs: Any) -> Any:
        if change == "positional":
            return ours(*args, num_fwd_outputs, **kwargs)
        return ours(*args, num_outputs=num_fwd_outputs, **kwargs)

    monkeypatch.setattr(compile_fx, "partition_fn", _with_joint_pass(called))
    _falls_back(_Head(), "custom_partitioner_fn is called with other arguments")


# ---- the last graph pass -------------------------------------------------------------------------
def test_the_graph_pass_is_not_called(fallback: None, monkeypatch: Patch) -> None:
    _ignored(monkeypatch, "post_grad_custom_post_pass")
    _falls_back(_Head(), "mst_loop is not")  # Inductor finds a loop that nothing has lowered
    _strict_raises(_Head(), "mst_loop is not")


def test_the_graph_pass_is_renamed(fallback: None, monkeypatch: Patch) -> None:
    _renamed(monkeypatch, "post_grad_custom_post_pass")
    _falls_back(_Head(), "post_grad_custom_post_pass does not exist")


def test_no_hook_is_called(fallback: None, monkeypatch: Patch) -> None:
    for hook in ("custom_partitioner_fn", "post_grad_custom_post_pass"):
        _ignored(monkeypatch, hook)
    with inductor_config.patch(fx_graph_cache=True):  # it counts what is compiled
        _falls_back(_Head(), "post_grad_custom_post_pass is not called")


def test_the_graph_pass_gets_a_module(fallback: None, monkeypatch: Patch) -> None:
    class OfModules(_Without):
        def __getattr__(self, name: str) -> Any:
            found = getattr(self._config, name)
            if name != self._name or found is None:
                return found
            return lambda graph: found(graph.owning_module)

    config = OfModules(post_grad.config, "post_grad_custom_post_pass")
    monkeypatch.setattr(post_grad, "config", config)
    _falls_back(_Head(), "post_grad_custom_post_pass is called with other arguments")


def test_the_backward_is_compiled_later(fallback: None, monkeypatch: Patch) -> None:
    """Its loops could not be undone any more if they failed then."""
    _ignored(monkeypatch, "force_non_lazy_backward_lowering")
    (told,) = _run(_MLP(), memory_budget=0.0)
    assert "torch has compiled 1 of 2 loops" in told
    assert not _has_loops()


# ---- the schedule --------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("change", [_ignored, _renamed])
def test_the_schedule_cannot_be_seen(monkeypatch: Patch, change: Callable[..., None]) -> None:
    """The loops stay: that they were lowered is known without it."""
    change(monkeypatch, "_post_fusion_custom_pass")
    (told,) = _run(_Head())
    assert "mstpass cannot see Inductor's schedule" in told
    assert _has_loops()
    assert mstpass.reports()[-1].outcome.scheduled_peak_bytes is None
    _strict_raises(_Head(), "_post_fusion_custom_pass is not called")


def _written_by_another(patch: Patch) -> None:
    """The code of a graph is written by another function than the one that its scheduler has."""
    write = scheduler.Scheduler.codegen
    own = property(lambda one: functools.partial(write, one), lambda one, value: None)
    patch.setattr(scheduler.Scheduler, "codegen", own)


def test_the_order_of_loops_cannot_be_checked(fallback: None, monkeypatch: Patch) -> None:
    """The kernels were seen, but not when they were in their final order."""
    _written_by_another(monkeypatch)
    _strict_raises(_Head(), "Scheduler.codegen is not called")


@pytest.mark.full
def test_the_order_of_loops_is_not_checked(monkeypatch: Patch) -> None:
    _written_by_another(monkeypatch)
    (told,) = _run(_Head())
    assert "that kernels wait for loops is not checked" in told and "Scheduler.codegen" in told
    assert _has_loops()


def _is_loop(kernel: Any) -> bool:
    return type(kernel.node).__name__ == "WhileLoop"


@pytest.mark.full
@pytest.mark.parametrize("change", [_ignored, _renamed])
def test_kernels_are_not_seen_before_they_are_fused(
    fallback: None, monkeypatch: Patch, change: Callable[..., None]
) -> None:
    change(monkeypatch, "_pre_fusion_custom_pass")
    _falls_back(_Head(), "_pre_fusion_custom_pass is not called")


class _Move(CustomSchedulerPass):  # type: ignore[misc]
    """A scheduler that runs loops last, or not at all."""

    def __init__(self, loops: Callable[[list[Any]], list[Any]]):
        self.loops = loops

    def __call__(self, nodes: list[Any]) -> list[Any]:
        moved = self.loops(list(filter(_is_loop, nodes)))
        return [*(node for node in nodes if not _is_loop(node)), *moved]

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize(
    ("loops", "warning"),
    [
        (lambda loops: loops, "before the loop that fills it"),
        (lambda loops: [], "0 of a graph's 1"),
    ],
    ids=["last", "lost"],
)
def test_a_loop_is_not_where_it_must_be(
    fallback: None, monkeypatch: Patch, loops: Any, warning: str
) -> None:
    """Only this graph is left to Inductor: others may be right."""
    given = {"reorder_for_peak_memory": False, "_post_fusion_custom_pass": _Move(loops)}
    with pytest.raises(Exception, match=warning):
        _run(_Head(), inductor=given, strict=True)
    alone = backend.by_inductor_alone  # the user's pass would move the loops of Inductor, too
    without = lambda gm, inputs, users: alone(gm, inputs, {})
    monkeypatch.setattr(backend, "by_inductor_alone", without)
    (told,) = _run(_Head(), inductor=given)
    assert "mstpass failed on a graph" in told and warning in told


def test_the_scheduler_cannot_be_patched(fallback: None, monkeypatch: Patch) -> None:
    monkeypatch.delattr(SchedulerNode, "recompute_size_and_body")
    _falls_back(_Head(), "recompute_size_and_body")


# ---- what the loops are made of ------------------------------------------------------------------
def test_inductor_cannot_lower_a_while_loop(fallback: None, monkeypatch: Patch) -> None:
    monkeypatch.delitem(lowering.lowerings, torch.ops.higher_order.while_loop)
    (told,) = _run(_Head())
    assert "mstpass failed on a graph" in told
    assert not _has_loops()


class _Fails(CustomSchedulerPass):  # type: ignore[misc]
    def __call__(self, nodes: list[Any]) -> list[Any]:
        raise ZeroDivisionError("a pass of the user's")

    def uuid(self) -> None:
        return None


def test_a_program_that_inductor_cannot_compile_is_not_ours() -> None:
    """The error is the program's own, and mstpass says nothing."""
    before = len(mstpass.reports())
    with pytest.raises(Exception, match="a pass of the user's"):
        _run(_Head(), inductor={"_post_fusion_custom_pass": _Fails()})
    assert not mstpass.reports()[before:]


# ---- names that mstpass imports ------------------------------------------------------------------
def test_a_name_that_cannot_be_imported(fallback: None, monkeypatch: Patch) -> None:
    monkeypatch.delattr("torch._inductor.custom_graph_pass.CustomPartitionerFn")
    for name in ("mstpass.torch_internals.inductor", "mstpass.backend", "mstpass.inductor_hooks"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mstpass.backend")
    model = _Head()
    for count in (1, 0):
        torch.compiler.reset()
        step = torch.compile(model, backend=entry_point.mst, options={"logits": "drop"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _gradients(model, step)
        told = [str(w.message) for w in caught if "mstpass" in str(w.message)]
        assert len(told) == count and all("CustomPartitionerFn" in text for text in told)
        for ours, eagers in zip(found, _gradients(model, model), strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-7)
    torch.compiler.reset()
    step = torch.compile(model, backend=entry_point.mst, options={"strict": True})
    with pytest.raises(Exception, match="CustomPartitionerFn"):
        _gradients(model, step)
