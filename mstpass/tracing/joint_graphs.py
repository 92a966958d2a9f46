"""The joint graphs of a function, traced as for a compilation and not compiled.

Dynamo traces on fake tensors, and AOTAutograd's partitioner is where it ends. Of a function that is
one graph nothing is run, and what this process has compiled stays: it is called from a function
whose code is new each time, so that Dynamo neither finds nor keeps anything under its name
(``CacheEntry``, and the code state that makes a size dynamic once it has had two values:
torch/_dynamo/pgo.py). What breaks into several is run on fake tensors.

Private APIs, checked with torch 2.11 and 2.13: Dynamo's bytecode hook, its reason for the end of a
graph, and its cache of compiled frames.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.output_graph import GraphCompileReason
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mstpass.backend import prepare
from mstpass.errors import UserError
from mstpass.tracing.fake_tensors import Fakes, innermost, is_compiled, runs_compiled

T = TypeVar("T")
Take = Callable[[fx.GraphModule, dict[str, Any]], T]
_numbers = itertools.count()


class NoJointGraph(UserError):
    """The function cannot be traced as one graph, or has no backward."""


def at_joint(
    fn: Callable[..., Any], inputs: Sequence[Tensor], take: Callable[[fx.GraphModule, int], T]
) -> T:
    """What ``take`` makes of a function's joint graph and its number of forward outputs.

    The function is traced but not compiled.
    """
    return trace_joint(fn, inputs, {}, lambda gm, kwargs: take(gm, kwargs["num_fwd_outputs"]))


def trace_joint(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    take: Take[T],
    before: Callable[[Sequence[Any]], None] = lambda inputs: None,
) -> T:
    """What ``take`` makes of a function's joint graph and what AOTAutograd gives a partitioner.

    Meta tensors among the arguments, and in the modules that the function is, holds or is given,
    stand for tensors of the default device.

    Args:
        before: is given the graph's inputs, before it is traced further.

    Raises:
        NoJointGraph: there is no backward. What the function, Dynamo or ``take`` raise comes as it
            is.
    """
    found: list[T] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        before(example_inputs)
        found.append(_at_partitioner(gm, example_inputs, take))
        raise _Taken

    inner = innermost(fn)
    with Fakes().within((inner, args, kwargs)) as (_, given_args, given_kwargs), _undisturbed():
        try:
            compiled = torch.compile(_caller_of(inner), backend=backend, fullgraph=True)
            compiled(inner, given_args, given_kwargs)
        except Exception as error:
            if not found:
                raise cause_of(error) from None
    if not found:
        raise NoJointGraph("no computation: nothing was traced")
    return found[0]


@dataclass(frozen=True)
class Traced(Generic[T]):
    """What was made of each graph of a function, in the order in which they are met.

    Attributes:
        parts: with Dynamo's reason why the graph ends; None where the function returns.
        of_callees: whether they are those of functions that it calls, and it is not compiled.
        stopped: what kept the function from going on after the last of them.
    """

    parts: tuple[tuple[T, GraphCompileReason | None], ...]
    of_callees: bool
    stopped: Exception | None


def trace_each(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    take: Take[T],
    before: Callable[[Sequence[Any]], None] = lambda inputs: None,
) -> Traced[T]:
    """`trace_joint` of every graph with a backward that a function compiles to.

    ``fn`` is compiled; where it is compiled already, or calls what is, it is called as it is. It
    runs on fake tensors: a graph op by op once it is traced, what lies between graphs as it is. A
    function that this process had compiled keeps that; of the entries that Dynamo allows it
    (``recompile_limit``) this takes one.

    Raises:
        NoJointGraph: no graph has a backward. What the function raises before there is one, and
            what Dynamo or ``take`` raise, comes as it is.
    """
    fakes = Fakes(every=True)
    parts: list[tuple[T, GraphCompileReason | None]] = []
    failed: list[Exception] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        reason = gm.compile_subgraph_reason
        ends = reason if isinstance(reason, GraphCompileReason) and reason.graph_break else None
        try:
            before(example_inputs)
            parts.append((_at_partitioner(gm, example_inputs, take), ends))
        except NoJointGraph:  # Inductor's alone
            pass
        except Exception as error:  # Dynamo would go on without it
            failed.append(error)

        def run(*inputs: Any) -> Any:
            with fakes.mode:
                return gm(*map(fakes.of, inputs))

        return run

    stopped = None
    with fakes.within((fn, args, kwargs)) as (step, given_args, given_kwargs), _undisturbed():
        as_it_is = runs_compiled((fn, args, kwargs))
        run = step if as_it_is else torch.compile(step, backend=backend)
        with _forced(backend):
            try:
                run(*given_args, **given_kwargs)
            except Exception as error:
                stopped = cause_of(error)
    if failed:
        raise cause_of(failed[0])
    if not parts:
        raise stopped or NoJointGraph("no backward: nothing that requires a gradient is compiled")
    return Traced(tuple(parts), as_it_is and not is_compiled(fn), stopped)


class OptimizerSteps(Exception):
    """In a function that is run on fake tensors, where its optimizers hold real ones."""


@contextmanager
def _forced(backend: Any) -> Iterator[None]:
    """All that torch.compile made has this backend, and forgets what that gave it."""
    codes: list[types.CodeType] = []

    def refuse(*_: Any) -> None:
        raise OptimizerSteps("an optimizer steps, which is not done here")

    hooks = [
        register_bytecode_hook(lambda code, _: codes.append(code)),
        register_optimizer_step_pre_hook(refuse),
    ]
    try:
        # otherwise sizes that it sees would be symbolic in a later compilation
        with (
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
            torch.compiler.set_stance("default", force_backend=backend),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for code in codes:
            entries = _debug_get_cache_entry_list(code)
            if all(entry.backend is backend for entry in entries):
                reset_code(code)


def _at_partitioner(gm: fx.GraphModule, inputs: Sequence[Any], take: Take[T]) -> T:
    """What ``take`` makes of the joint graph of what Dynamo captured.

    Raises:
        NoJointGraph: there is no backward.
    """
    found: list[T] = []

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:
            prepare(gm)
            found.append(take(gm, given))
            raise _Taken

        def uuid(self) -> Any:
            return None

    patches = {"custom_partitioner_fn": Partitioner(), "fx_graph_cache": False}
    try:
        compile_fx(gm, list(inputs), inner_compile=_not_joint, config_patches=patches)
    except _Taken:
        return found[0]
    raise AssertionError("compile_fx asked neither the partitioner nor the compiler")


def _not_joint(*_: Any, **__: Any) -> Any:
    raise NoJointGraph("no backward: nothing that requires a gradient reaches its result")


class _Taken(Exception):
    """The partitioner has what it wanted."""


def cause_of(error: Exception) -> Exception:
    """What a backend raised, of Dynamo's error about it; others as they are."""
    inner = getattr(error, "inner_exception", None)
    return cause_of(inner) if isinstance(inner, Exception) else error


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _caller_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls it, with code of its own and the same globals.

    Of a function with other globals Dynamo would import the module, and some have none that can be
    imported, such as those of ``exec``.
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


# What they would say is said by errors, or is no concern of who explains.
_SILENCED = (
    "torch._subclasses.fake_tensor",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.variables.ctx_manager",
)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The random state stays as it is, and torch does not log what it comes across."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    logs = {log: log.disabled for log in map(logging.getLogger, _SILENCED)}
    try:
        for log in logs:
            log.disabled = True
        with torch.random.fork_rng(devices):
            yield
    finally:
        for log, disabled in logs.items():
            log.disabled = disabled
