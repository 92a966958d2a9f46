"""Trace the joint graphs of a function as a compilation would, without compiling them.

Dynamo traces the function on fake tensors, AOTAutograd makes the joint graph, and the partitioner
that it calls ends the trace.

A function that is one graph is not run at all, and what this process has compiled stays as it is.
For that, the function is called from a function whose code object is new each time, so Dynamo
neither finds nor keeps anything under its name: no ``CacheEntry``, and no state that makes a size
dynamic once it has had two values (torch/_dynamo/pgo.py). A function that breaks into several
graphs runs on fake tensors.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import logging
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mstpass.errors import UserError
from mstpass.report.graph_ends import why_no_backward
from mstpass.torch_internals.aot_autograd import (
    merge_equal_nodes,
    min_cut_rematerialization_partition,
)
from mstpass.torch_internals.dynamo import (
    TRACING_LOGGERS,
    GraphCompileReason,
    forget_backend,
    graph_break_after,
    register_bytecode_hook,
)
from mstpass.torch_internals.inductor import CustomPartitionerFn, compile_fx
from mstpass.torch_internals.modules import is_compiled, uncompiled
from mstpass.torch_internals.settings import static_sizes, without_padding
from mstpass.tracing.fake_tensors import FakeTensors, calls_compiled

T = TypeVar("T")
UseJoint = Callable[[fx.GraphModule, dict[str, Any]], T]
"""Gets a joint graph and the arguments that AOTAutograd gives to a partitioner with it."""

Finish = Callable[[Callable[..., Any]], Callable[..., Any]]
UseCaptured = Callable[[fx.GraphModule, Sequence[Any]], Finish]
"""Gets a graph that Dynamo captured and its inputs, before its joint graph is traced.

It may take outputs out of the graph. What it returns puts something in their places: it makes the
function that the user's code calls of a function that runs the graph.
"""


def _as_it_is(gm: fx.GraphModule, inputs: Sequence[Any]) -> Finish:
    return lambda run: run


_numbers = itertools.count()


class NoJointGraph(UserError):
    """The function cannot be traced as one graph, or has no backward."""


def trace_joint(
    fn: Callable[..., Any], inputs: Sequence[Tensor], use: Callable[[fx.GraphModule, int], T]
) -> T:
    """What ``use`` returns for a function's joint graph and its number of forward outputs."""
    return trace_one_graph(
        fn, inputs, {}, lambda joint, kwargs: use(joint, kwargs["num_fwd_outputs"])
    )


def trace_one_graph(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    use_joint: UseJoint[T],
    use_captured: UseCaptured = _as_it_is,
    device: torch.device | None = None,
) -> T:
    """What ``use_joint`` returns for the joint graph of a function that is one graph.

    A meta tensor stands for a tensor of the default device. It may be an argument, or be held by a
    module that the function is, holds or is given. With ``device``, all tensors stand for tensors
    of that device.

    Raises:
        NoJointGraph: there is no backward. Errors of the function, of Dynamo and of ``use_joint``
            are raised as they are.
    """
    found: list[T] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        use_captured(gm, example_inputs)
        found.append(_trace_captured(gm, example_inputs, use_joint))
        raise _JointGraphUsed

    plain = uncompiled(fn)
    fakes = FakeTensors(device=device)
    with fakes.replacing((plain, args, kwargs)) as (_, given_args, given_kwargs), _undisturbed():
        try:
            compiled = torch.compile(_new_caller(plain), backend=backend, fullgraph=True)
            # the user's stance may be to compile nothing
            with fakes.made_there(), torch.compiler.set_stance("default"):
                compiled(plain, given_args, given_kwargs)
        except Exception as error:
            if not found:
                raise cause_of(error) from None
    if not found:
        raise NoJointGraph("no backward: the function has no tensor operations")
    return found[0]


@dataclass(frozen=True)
class TracedGraphs(Generic[T]):
    """What was made of each graph of a function, in the order in which the graphs run.

    Attributes:
        parts: the result for a graph, and Dynamo's reason why the graph ends; None if it ends
            because the function returns.
        of_callees: the function is not compiled, and the graphs are those of functions it calls.
        stopped_by: the error that ended the function after the last graph; None if it returned.
    """

    parts: tuple[tuple[T, GraphCompileReason | None], ...]
    of_callees: bool
    stopped_by: Exception | None


def trace_each_graph(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    use_joint: UseJoint[T],
    use_captured: UseCaptured = _as_it_is,
    device: torch.device | None = None,
) -> TracedGraphs[T]:
    """What ``use_joint`` returns for each graph with a backward that a function compiles to.

    ``fn`` is compiled, unless it is compiled already or calls compiled functions. It runs on fake
    tensors: a graph runs op by op after it is traced, and the code between graphs runs as it is.
    A function that this process had compiled stays compiled; the trace takes one of the entries
    that Dynamo allows it (``recompile_limit``).

    Raises:
        NoJointGraph: no graph has a backward. An error of the function before the first graph, and
            errors of Dynamo and of ``use_joint``, are raised as they are.
    """
    fakes = FakeTensors(also_real=True, device=device)
    parts: list[tuple[T, GraphCompileReason | None]] = []
    failed: list[Exception] = []
    without: list[Exception] = []  # why a graph has no backward

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graph_break = graph_break_after(gm)
        finish: Finish = lambda run: run
        try:
            finish = use_captured(gm, example_inputs)
            made = _trace_captured(gm, example_inputs, use_joint)
            parts.append((made, graph_break))
        except NoJointGraph as error:  # a graph without a backward has no report
            without.append(error)
        except Exception as error:  # if it were raised here, Dynamo would go on without it
            failed.append(error)

        def run(*inputs: Any) -> Any:
            with fakes.mode:
                return gm(*map(fakes.fake_of, inputs))

        return finish(run)

    stopped_by = None
    with fakes.replacing((fn, args, kwargs)) as (step, given_args, given_kwargs), _undisturbed():
        has_compiled = calls_compiled((fn, args, kwargs))
        run = step if has_compiled else torch.compile(step, backend=backend)
        with fakes.made_there(), _backend_everywhere(backend):
            try:
                run(*given_args, **given_kwargs)
            except Exception as error:
                stopped_by = cause_of(error)
    if failed:
        raise cause_of(failed[0])
    if not parts:
        nothing = NoJointGraph("no backward: no function was compiled")
        raise stopped_by or next(iter(without), nothing)
    return TracedGraphs(tuple(parts), has_compiled and not is_compiled(fn), stopped_by)


class OptimizerSteps(Exception):
    """An optimizer steps in a function that runs on fake tensors, though its state is real."""


@contextmanager
def _backend_everywhere(backend: Any) -> Iterator[None]:
    """Compile every function with this backend; afterwards forget what that compiled."""
    codes: list[types.CodeType] = []

    def refuse(*_: Any) -> None:
        raise OptimizerSteps("an optimizer steps, and explain changes no parameters")

    hooks = [
        register_bytecode_hook(lambda code, _: codes.append(code)),
        register_optimizer_step_pre_hook(refuse),
    ]
    try:
        # With automatic dynamic shapes, the sizes seen here would be symbolic in a later
        # compilation of the same function.
        with (
            static_sizes(),
            torch.compiler.set_stance("default", force_backend=backend),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for code in codes:
            forget_backend(code, backend)


def _trace_captured(gm: fx.GraphModule, inputs: Sequence[Any], use_joint: UseJoint[T]) -> T:
    """What ``use_joint`` returns for the joint graph of a graph that Dynamo captured.

    Raises:
        NoJointGraph: there is no backward.
    """
    found: list[T] = []
    none = NoJointGraph(f"no backward: {why_no_backward(gm, inputs)}")

    def no_backward(*_: Any, **__: Any) -> Any:
        """In place of Inductor's compiler, which is called first only if there is no backward."""
        raise none

    if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        raise none

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:
            if not joint_inputs:  # a nested compile region; the graph that calls it comes later
                return min_cut_rematerialization_partition(gm, joint_inputs, **given)
            merge_equal_nodes(gm)
            found.append(use_joint(gm, given))
            raise _JointGraphUsed

        def uuid(self) -> Any:
            return None

    patches = {
        "custom_partitioner_fn": Partitioner(),
        "fx_graph_cache": False,
        **without_padding(),
    }
    try:
        compile_fx(gm, list(inputs), inner_compile=no_backward, config_patches=patches)
    except _JointGraphUsed:
        return found[0]
    raise AssertionError("compile_fx asked neither the partitioner nor the compiler")


class _JointGraphUsed(Exception):
    """The joint graph was used as asked; the compilation can end."""


def cause_of(error: Exception) -> Exception:
    """The error that a backend raised, if Dynamo wrapped it in one of its own."""
    inner = getattr(error, "inner_exception", None)
    return cause_of(inner) if isinstance(inner, Exception) else error


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _new_caller(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``fn``, with a code object of its own and the globals of ``fn``.

    With other globals Dynamo would import the module of ``fn``, but some functions have a module
    that cannot be imported, such as those that ``exec`` defines.
    """
    code = _call.__code__.replace(co_name=f"traced_{next(_numbers)}")
    return types.FunctionType(code, _globals_of(fn))


def _globals_of(fn: Any) -> dict[str, Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    fn = getattr(fn, "__func__", fn)
    known = getattr(fn, "__globals__", None)
    fresh = {"__builtins__": builtins, "__name__": __name__}
    return known if isinstance(known, dict) and "__builtins__" in known else fresh


@contextmanager
def random_numbers_kept(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore afterwards the random states of torch, Python and NumPy, and these generators'."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    numpys: Any = getattr(sys.modules.get("numpy"), "random", None)
    with ExitStack() as restored, torch.random.fork_rng(devices):
        restored.callback(random.setstate, random.getstate())
        if numpys is not None:
            restored.callback(numpys.set_state, numpys.get_state())
        for generator in generators:
            restored.callback(generator.set_state, generator.get_state())
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore the random states afterwards, and keep torch from logging while it traces."""
    logs = {log: log.disabled for log in map(logging.getLogger, TRACING_LOGGERS)}
    try:
        for log in logs:
            log.disabled = True
        with random_numbers_kept():
            yield
    finally:
        for log, disabled in logs.items():
            log.disabled = disabled
