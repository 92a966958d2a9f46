"""AOTAutograd: its partitioner, and how compiled backwards are run.

mstpass chooses the saved values, and has torch build the forward and the backward graph around
them. Graphs that it does not split go to torch's partitioner. Source:
torch/_functorch/partitioners.py and compile_utils.py, torch/fx/traceback.py.

mstpass has the backward compiled with its forward, before anything is known about how it will be
called (`retain_graph`, `create_graph`). A *donated* buffer is a saved value that backward may
overwrite; torch lists them by the position of backward's inputs. Source: ``CompiledFunction`` in
torch/_functorch/_aot_autograd/runtime_wrappers.py, which ``RuntimeWrapper.post_compile`` gets by
its ``apply``, whether it is compiled now or was cached.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, fx
from torch._dynamo import compiled_autograd
from torch._functorch import partitioners
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V
from torch._prims_common import clone_preserve_strides
from torch.fx.experimental._backward_state import BackwardState
from torch.utils._ordered_set import OrderedSet

from mstpass.torch_internals.settings import merges_equal_nodes
from mstpass.torch_internals.versions import find_or_none, has_release

__all__ = ["min_cut_rematerialization_partition"]

_TAKES_OPAQUE_NODES = (  # from 2.12 on
    "saved_opaque_nodes" in inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
)
_budget_of = find_or_none("torch.fx.traceback._get_memory_budget_annotation")  # from 2.13 on
Modules = tuple[fx.GraphModule, fx.GraphModule]


def merge_equal_nodes(gm: fx.GraphModule) -> None:
    """Remove dead code and common subexpressions of a joint graph, as torch's partitioner does."""
    gm.graph.eliminate_dead_code()
    if merges_equal_nodes():
        gm.graph = fx_graph_cse(gm.graph)
    gm.recompile()


def extract_forward_and_backward(
    gm: fx.GraphModule,
    saved: list[fx.Node],
    saved_sizes: list[fx.Node],
    num_fwd_outputs: int,
    static_inputs: Iterable[fx.Node],
    saved_opaque: Iterable[fx.Node] = (),
) -> Modules:
    """The two graphs of a joint graph.

    Args:
        saved: what forward returns for backward, in this order; inputs of the step among it.
        static_inputs: inputs that stay at their addresses from step to step, as parameters do.
        saved_opaque: values that backward reads and that are neither tensors nor sizes, such as
            device meshes.
    """
    opaque: dict[str, Any] = {}
    if _TAKES_OPAQUE_NODES:
        opaque["saved_opaque_nodes"] = list(saved_opaque)
    else:
        saved = [*saved, *saved_opaque]
    return partitioners._extract_fwd_bwd_modules(
        gm,
        saved,
        saved_sym_nodes=saved_sizes,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(static_inputs),
        **opaque,
    )


def finish_forward_and_backward(forward: fx.GraphModule, backward: fx.GraphModule) -> Modules:
    """Take results of calls right after them, and hand on the state of random draws."""
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def saved_by_torch(
    gm: fx.GraphModule, num_fwd_outputs: int, static_inputs: list[int] | None = None
) -> list[str]:
    """The names of what torch's partitioner would save, sizes and inputs of the step among it.

    The graph is changed as that partitioner changes it, so give a copy; equal nodes are merged.

    Args:
        static_inputs: the positions of inputs that stay at their addresses from step to step.

    Raises:
        Exception: the partitioner fails on this graph.
    """
    try:
        forward, _ = _choosing_alone()(
            gm, None, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_inputs
        )
    except _Chosen as chosen:
        return chosen.names
    # A backward that needs no tangent is left to another partitioner, which builds the graphs.
    outputs: Any = forward.graph.output_node().args[0]
    return [node.name for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node)]


class _Chosen(Exception):
    """torch's partitioner has chosen what to save."""

    def __init__(self, names: list[str]):
        super().__init__(names)
        self.names = names


def _choosing_alone() -> Callable[..., Modules]:
    """torch's partitioner up to its choice, with which it raises ``_Chosen``.

    To build the two graphs takes longer than to choose. It is the same code with other globals, so
    that a partition in another thread is not disturbed. It merges no nodes again, and asks no other
    rank: not every rank may come here.
    """

    def chosen(_: Any, saved: list[fx.Node], *args: Any, **kwargs: Any) -> NoReturn:
        opaque = kwargs.get("saved_opaque_nodes") or []
        nodes = [*saved, *opaque, *(kwargs.get("saved_sym_nodes") or [])]
        raise _Chosen([node.name for node in nodes])

    function = min_cut_rematerialization_partition
    replaced = {
        "_extract_fwd_bwd_modules": chosen,
        "_sync_decision_cross_ranks": lambda graph, saved, *args, **kwargs: saved,
        "fx_graph_cse": lambda graph, *args, **kwargs: graph,
    }
    copy = types.FunctionType(function.__code__, {**function.__globals__, **replaced})
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__defaults__ = function.__defaults__
    return copy


def is_write_of_backward(node: fx.Node) -> bool:
    """Whether an op that writes to its operands was traced in the backward and must run there."""
    return bool(partitioners._must_be_in_backward(node))


def has_torch_budget(nodes: Iterable[fx.Node]) -> bool:
    """Whether a node is under ``torch.autograd.graph.region_activation_memory_budget``."""
    return _budget_of is not None and any(_budget_of(node) is not None for node in nodes)


# ---- donated buffers ---------------------------------------------------------------------------
class _Donated(list[int]):
    """Positions of donated buffers; the compile caches read a list, without this project."""

    def __reduce__(self) -> Any:
        return list, (list(self),)


class _OfNoSubgraph(_Donated):
    """None is found among the inputs of a graph while a subgraph is lowered."""

    def __contains__(self, position: object) -> bool:
        return not isinstance(V.graph, SubgraphLowering) and super().__contains__(position)


class _CopiedWhereKept(_Donated):
    """torch, which asks whether they are ``!= []``, finds none."""

    def __ne__(self, other: object) -> bool:
        return False


def keep_donations_from_subgraphs(graph: fx.Graph) -> None:
    """Let the donations of a backward that Inductor compiles now hold for its own inputs alone.

    Up to torch 2.14 Inductor looks up the inputs of every subgraph in the same list, a loop's body
    among them, and may overwrite a weight there as if it were donated (pytorch #153679, #192840;
    source: ``GraphLowering.placeholder`` in torch/_inductor/graph.py).
    """
    if not is_backward(graph) or has_release("2.15"):
        return
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = getattr(metadata, "bw_donated_idxs", None)
    if metadata is not None and donated:
        metadata.bw_donated_idxs = _OfNoSubgraph(donated)


def is_backward(graph: fx.Graph) -> bool:
    """Whether a graph that Inductor compiles is the backward of a step."""
    return any("tangents" in str(n.target) for n in graph.find_nodes(op="placeholder"))


# ---- backwards that keep their graph -----------------------------------------------------------
class CompiledFunctions:
    """The autograd functions of one compiled graph, which run its forward and its backward.

    Attributes:
        writes_inputs: the graph writes to its inputs.
        on_error: called with the error of a backward, which is raised afterwards.
    """

    def __init__(self) -> None:
        self.writes_inputs = False
        self.on_error: Callable[[Exception], None] | None = None
        self._nodes: list[type] = []

    def add(self, function: Any) -> None:
        self._nodes.append(function._backward_cls)
        inputs = function.metadata.input_info
        self.writes_inputs |= any(x.mutates_data or x.mutates_metadata for x in inputs)

    def made(self, value: object) -> bool:
        """Whether an object is a node of autograd's graph that one of the functions has made."""
        return type(value) in self._nodes


@contextmanager
def backwards_may_keep_graphs() -> Iterator[CompiledFunctions]:
    """Backwards of functions that this thread compiles in here may run while graphs are kept.

    Inductor plans to overwrite donated buffers, and torch refuses to run such a backward while its
    graph is kept (``retain_graph=True``), though Inductor alone, which compiles the backward at its
    first call, would have donated nothing. A backward of ours whose graph is kept gets copies of
    the donated buffers and overwrites these. Dynamo, which compiles whatever a step calls between
    two graphs, is kept from what is added.

    Yields:
        The functions, once they are compiled.
    """
    _patch_once()
    functions = CompiledFunctions()
    token = _here.set(functions)
    try:
        yield functions
    finally:
        _here.reset(token)


_here: ContextVar[CompiledFunctions | None] = ContextVar("what mstpass compiles", default=None)


@functools.cache
def _patch_once() -> None:
    """The patch stays: threads that compile without mstpass are told apart by ``_here``."""
    original = runtime_wrappers.RuntimeWrapper.post_compile

    def post_compile(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(compiled_fn, "__self__", None)
        functions = _here.get()
        if functions is not None and hasattr(function, "_backward_impl"):
            _extend(function, functions)
        return original(self, compiled_fn, *args, **kwargs)

    runtime_wrappers.RuntimeWrapper.post_compile = post_compile  # type: ignore[method-assign]


def _extend(function: Any, functions: CompiledFunctions) -> None:
    """Extend the autograd function of a compiled graph."""
    functions.add(function)
    donated = function.metadata.bw_donated_idxs
    if donated and function.compiled_bw is not None:  # else torch itself donates nothing
        function.metadata.bw_donated_idxs = _CopiedWhereKept(donated)
    else:
        donated = ()
    backward = _extended(function._backward_impl, tuple(donated), functions)
    function._backward_impl = staticmethod(backward)


def _extended(
    run: Callable[..., Any], donated: Sequence[int], functions: CompiledFunctions
) -> Callable[..., Any]:
    """The backward, which tells of its errors.

    While its graph is kept, it gets copies of the donated buffers.
    """

    @torch.compiler.disable
    def extended(ctx: Any, all_args: list[Any]) -> Any:
        try:
            if donated and torch._C._autograd._get_current_graph_task_keep_graph():
                for position in donated:
                    if isinstance(value := all_args[position], Tensor):
                        all_args[position] = clone_preserve_strides(value)
            return run(ctx, all_args)
        except Exception as error:
            if functions.on_error is not None:
                functions.on_error(error)
            raise

    return extended


# ---- compiled autograd -------------------------------------------------------------------------
def traces_backward_again() -> bool:
    """Whether backwards of what is compiled now may be traced by compiled autograd.

    Compiled autograd copies the backward graph of a compiled function into a graph of the whole
    backward, which Dynamo traces and compiles a second time. Dynamo knows no higher-order op of
    ours, so that graph would break at each loop, and the loops would run op by op. Source:
    torch/_dynamo/compiled_autograd.py, torch/_dynamo/eval_frame.py.
    """
    return bool(dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def has_backward_hooks(inputs: Iterable[object]) -> bool:
    """Whether the backward of the graph with these inputs is for compiled autograd alone.

    A graph in which a tensor gets a backward hook has a further input for the hook, a
    ``BackwardState``. Inductor cannot compile its backward (``count_tangents`` in
    torch/_inductor/utils.py expects the tangents last).
    """
    return any(isinstance(value, BackwardState) for value in inputs)
