"""Helpers of the tests: compare compiled steps with eager and float64, and capture graphs."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as inductor
from torch import fx, nn
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.utils._python_dispatch import TorchDispatchMode

import mstpass
from mstpass import backend
from mstpass.plans import ERROR_IN_16_BITS, INPUT
from mstpass.torch_internals.inductor import CustomPartitionerFn, compile_fx
from mstpass.torch_internals.settings import inductor_setting

Loss = Callable[..., torch.Tensor]
KERNELS = "MSTPASS_TESTS_COMPILE_KERNELS"  # an environment variable, set by ``pytest --all``
STRICT = {"strict": True}


def compiled(
    fn: Callable[..., Any], dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    given = {**STRICT, **options}
    return torch.compile(fn, backend="mst", fullgraph=True, dynamic=dynamic, options=given)


def step_of(loss: Loss) -> Callable[[nn.Module], Loss]:
    """From a model to the loss of its inputs; ``loss`` takes the model first."""
    return lambda model: lambda *inputs: loss(model, *inputs)


def gradients(
    model: nn.Module, loss: Loss, inputs: Sequence[torch.Tensor], autocast: str | None = None
) -> list[torch.Tensor]:
    """The loss, the gradients of parameters, and those of inputs that require one.

    The inputs are passed as they are: a dim that is marked dynamic stays marked.
    """
    model.zero_grad(set_to_none=True)
    for x in inputs:
        x.grad = None
    context = torch.autocast(autocast, torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        value = loss(*inputs)
    value.backward()
    leaves = [*model.parameters(), *inputs]
    return [value.detach(), *(p.grad.clone() for p in leaves if p.grad is not None)]


def in_float64(model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[nn.Module, list[Any]]:
    wide = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    ]
    return copy.deepcopy(model).double(), wide


class KeepFloat64(TorchDispatchMode):
    """Within it, casts to float32 are casts to float64, so that a reference keeps its precision.

    Losses compute in float32 whatever the logits' dtype is. A reference that did so too would share
    the rounding of eager's float32, and of no other program.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("dtype") is torch.float32:
            given["dtype"] = torch.float64
        return func(*args, **given)


def errors(values: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """Relative error of each value; values that are zero but for noise are left out."""
    scale = max(float(e.norm()) / math.sqrt(max(1, e.numel())) for e in exact)
    result = []
    for value, reference in zip(values, exact, strict=True):
        rms = float(reference.norm()) / math.sqrt(max(1, reference.numel()))
        if rms > 1e-9 * scale:
            difference = (value.double() - reference).norm() / reference.norm()
            result.append(float(difference))
    return result


def check_against_float64(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Loss],
    inputs: Sequence[torch.Tensor],
    *,
    autocast: str | None = None,
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
    beyond: float = 1e-6,
    **options: Any,
) -> mstpass.Report:
    """Compile ``loss_of(model)`` with mst and hold its loss and gradients to eager's accuracy.

    ``finish`` makes a scalar of the result outside the compiled function.

    In float32 each relative error may exceed eager's by ``beyond``; in bfloat16 (parameters or
    autocast) the root mean square of all may exceed eager's by 10 %, or by the bound of sums in 16
    bits where the report names such loops, and no single one may be over twice it.
    """
    exact = _exact(model, loss_of, inputs, finish)
    eager = errors(gradients(model, _finished(loss_of(model), finish), inputs, autocast), exact)
    before = len(mstpass.reports())
    step = _finished(compiled(loss_of(model), **options), finish)
    ours = errors(gradients(model, step, inputs, autocast), exact)
    again = errors(gradients(model, step, inputs, autocast), exact)
    low = autocast is not None or next(model.parameters()).dtype != torch.float32
    for mine, theirs, repeated in zip(ours, eager, again, strict=True):
        bound = 2 * theirs + 1e-3 if low else theirs + beyond
        assert mine <= bound, (ours, eager)
        assert repeated <= bound, (again, eager)
    reports = mstpass.reports()[before:]
    assert reports, "no graph was compiled with mst"
    report = reports[-1]
    if low:
        sums = {loop.accumulate for region in report.regions for loop in region.loops}
        factor = ERROR_IN_16_BITS if INPUT in sums else 1.1
        assert rms(ours) <= factor * rms(eager) + 1e-5, (ours, eager)
    return report


def check_batches(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Loss],
    batches: Iterable[Sequence[torch.Tensor]],
    *,
    dynamic: bool | None = None,
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
    **options: Any,
) -> list[mstpass.Report]:
    """Compile once for all batches, and hold each of them to eager's accuracy, in float32.

    Arguments are those of `check_against_float64`. Returns the reports of all plans.
    """
    before = len(mstpass.reports())
    check_step(compiled(loss_of(model), dynamic, **options), model, loss_of, batches, finish)
    return mstpass.reports()[before:]


def check_step(
    step: Loss,
    model: nn.Module,
    loss_of: Callable[[nn.Module], Loss],
    batches: Iterable[Sequence[torch.Tensor]],
    finish: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> None:
    """Hold a compiled step to eager's accuracy for each batch, in float32."""
    step = _finished(step, finish)
    for inputs in batches:
        exact = _exact(model, loss_of, inputs, finish)
        eager = errors(gradients(model, _finished(loss_of(model), finish), inputs), exact)
        ours = errors(gradients(model, step, inputs), exact)
        for mine, theirs in zip(ours, eager, strict=True):
            assert mine <= theirs + 1e-6, ([x.shape for x in inputs], ours, eager)


def _finished(fn: Loss, finish: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
    return lambda *args: finish(fn(*args))


def _exact(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Loss],
    inputs: Sequence[torch.Tensor],
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """The loss and the gradients in float64."""
    wide_model, wide_inputs = in_float64(model, inputs)
    with KeepFloat64():
        return gradients(wide_model, _finished(loss_of(wide_model), finish), wide_inputs)


def rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / max(1, len(values)))


def kinds(report: mstpass.Report) -> list[tuple[str, str]]:
    return [(region.kind, region.mode) for region in report.regions]


class _Captured(Exception):
    pass


def joint_graph(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None
) -> tuple[fx.GraphModule, int]:
    """The joint graph of a function after Inductor's joint passes, and its forward outputs."""
    found: list[tuple[fx.GraphModule, int]] = []

    class Capture(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            found.append((gm, kwargs["num_fwd_outputs"]))
            raise _Captured

        def uuid(self) -> Any:
            return None

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        patches = {"custom_partitioner_fn": Capture(), "fx_graph_cache": False}
        return compile_fx(gm, example_inputs, config_patches=patches)

    with contextlib.suppress(Exception):
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    torch.compiler.reset()
    assert found, "the function has no joint graph"
    return found[0]


# ---- without Inductor's kernels ------------------------------------------------------------------
def compiles_kernels() -> bool:
    """Whether all tests do, as under ``pytest --all``."""
    return KERNELS in os.environ


def examples(number: int) -> int:
    """How many random examples a property has: all of them under ``pytest --all``, else a third."""
    return number if compiles_kernels() else number // 3


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Within it, steps that mst or Inductor compiles run op by op: no C++ compiler is called.

    Dynamo, AOTAutograd, Inductor's joint passes and all of mstpass run as ever: the graphs are
    planned, rewritten, split, and their loops lowered. Only what Inductor does after its last graph
    pass is left out: its schedule, and the kernels. Under ``pytest --all`` nothing is left out.
    """
    if compiles_kernels():
        yield
        return
    compile_op_by_op = functools.partial(compile_fx, inner_compile=_as_it_is)
    with (
        mock.patch.object(backend, "compile_fx", compile_op_by_op),
        mock.patch.object(inductor, "compile_fx", compile_op_by_op),
        mock.patch.object(backend, "check_calls"),  # the hooks of the schedule are not called
        # It may hold the same graph with kernels, which another test has compiled.
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def _runs_without_kernels(op: Any) -> None:
    """torch 2.11 has no implementation of an op that orders nodes: Inductor lowers it away."""

    def run(_: object, subgraph: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return subgraph(*args, **kwargs)

    for key in (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.Autograd):
        if key not in op.py_kernels:
            op.py_impl(key)(run)


_runs_without_kernels(control_deps)


def _as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Stands where Inductor compiles the forward or the backward."""
    last_pass = inductor_setting("post_grad_custom_post_pass")
    if last_pass is not None:
        last_pass(gm.graph)
        gm.recompile()
    interpreter = Seeded(gm)

    def run(inputs: list[Any]) -> Any:
        with torch.no_grad():
            return interpreter.boxed_run(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]  # it takes, and empties, a list
    return run


class Seeded(fx.Interpreter):
    """Runs a graph; a random node draws by its seed, so the order of the nodes does not matter."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.prims.inductor_random.default:
            size, seed, mode = args
            generator = torch.Generator().manual_seed(int(seed))
            return getattr(torch, mode)(size, generator=generator)
        return super().call_function(target, args, kwargs)
