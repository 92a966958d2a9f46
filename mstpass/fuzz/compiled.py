"""A program compiled with mstpass: by Inductor, or fast, its rewritten graphs running op by op.

The fast kind goes all the way that a compilation goes, with ``strict``: Dynamo, AOTAutograd,
Inductor's joint passes, our pipeline and, if asked, the lowering of loops. Only then Inductor's
compiler is replaced by a function that runs the graph as it is. So no C++ compiler runs, and what
AOTAutograd does around the graphs (views, mutated inputs, unused outputs) is that of a real
compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from mstpass import fewer_loops
from mstpass.captured import Captured
from mstpass.fuzz.case import Case
from mstpass.fuzz.program import Call, Compile, drawn, new_seed
from mstpass.graph.sizes import Size, expression
from mstpass.inductor_hooks import LowerLoops, Partitioner
from mstpass.limit import Limit
from mstpass.options import Options
from mstpass.out_of_memory import CompiledPlan
from mstpass.plans_by_length import plans_by_length
from mstpass.report.graph_ends import lost
from mstpass.returned_logits import drop_logits
from mstpass.torch_internals.aot_autograd import backwards_may_keep_graphs
from mstpass.torch_internals.graphs import graph_module
from mstpass.torch_internals.inductor import boxed, compile_fx
from mstpass.torch_internals.settings import backward_compiled_at_once, without_padding


class Recording(Partitioner):
    """Our partitioner, which remembers the graphs that it was given and made, and one step.

    Attributes:
        joint, given: the joint graph, and what AOTAutograd gave with it.
        modules: the forward and the backward graph, as they were made.
        step: the inputs and the tangents of the first step, by the names that they have in the
            joint graph; None until that has run.
        of_first_batch: it is made for the batch with which the graph was traced, or its range.
    """

    joint: fx.GraphModule | None = None
    given: dict[str, Any]
    modules: tuple[fx.GraphModule, ...] | None = None
    step: dict[str, Any] | None = None
    of_first_batch = True

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.joint, self.given = gm, kwargs
        modules = super().__call__(gm, joint_inputs, **kwargs)
        self.modules = tuple(graph_module(m, copied(m.graph)) for m in modules)
        return modules

    def seen(self, graph: fx.Graph, values: Sequence[Any]) -> None:
        """Remember the inputs of a graph that are inputs of the joint graph."""
        names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        assert self.joint is not None, "the joint is known"
        wanted = {str(n.target) for n in self.joint.graph.find_nodes(op="placeholder")}
        self.step = self.step or {}
        for name, value in zip(names, values, strict=True):
            if name in wanted and name not in self.step:
                self.step[name] = value.clone() if isinstance(value, Tensor) else value


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def fast(setup: Case, record: list[Recording], ours: bool = True) -> Compile:
    """Compile for running op by op; ``record`` gets the partitioner of each graph.

    Args:
        ours: False leaves the graphs to torch's own partitioner: what then fails too is not ours.
    """
    options = Options.parse({**setup.options, "strict": True}, environ={})

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Call:
        drop = drop_logits(gm, options)
        first = True

        def compile_one(graph: Captured, limit: Limit | None = None) -> CompiledPlan:
            if not ours:
                return _run_op_by_op(graph, None)
            record.append(Recording(options, limit, planned_for=graph.planned_for))
            record[-1].of_first_batch = first
            return _run_op_by_op(graph, record[-1], setup.lowered)

        graph = Captured(gm, tuple(inputs), {}, options, drop)
        of_ranges = plans_by_length(graph, compile_one) if ours else None
        compiled = of_ranges or compile_one(graph).run
        first = False
        return drop.finish(compiled)

    return lambda model: _compiled(model, backend, setup)


def _run_op_by_op(
    graph: Captured, recording: Recording | None, lowered: bool = False
) -> CompiledPlan:
    """The plan of one graph; without a recording, torch's own split of it.

    Args:
        lowered: run the loops as Inductor's ``while_loop``.
    """
    patches: dict[str, Any] = {"fx_graph_cache": False, "fallback_random": False}
    patches |= without_padding()
    lower = None
    if recording is not None:
        patches["custom_partitioner_fn"] = recording
        if lowered:
            lower = LowerLoops(None, not recording.limit.is_free, recording, cached=False)

    def compile_graph(module: fx.GraphModule, *_: Any, **__: Any) -> Any:
        return _op_by_op(module, lower, recording)

    with backward_compiled_at_once(), backwards_may_keep_graphs() as functions:
        run: Any = compile_fx(
            graph.module, list(graph.inputs), inner_compile=compile_graph, config_patches=patches
        )
    limit, report = (recording.limit, recording.report) if recording else (Limit(), None)
    return CompiledPlan(run, functions, limit, report or lost())


def by_inductor(
    setup: Case, ours: bool = True, settings: Mapping[str, Any] | None = None
) -> Compile:
    """Compile as users do, strictly; or, for comparison, by Inductor alone.

    Args:
        settings: of Inductor, where it compiles alone.
    """
    if not ours:
        return lambda model: _compiled(model, "inductor", setup, options=settings)
    options = {**setup.options, "strict": True}
    return lambda model: _compiled(model, "mst", setup, options=options)


def _compiled(model: nn.Module, backend: Any, setup: Case, **options: Any) -> Call:
    torch.compiler.reset()
    dynamic = True if setup.dynamic == "all" else None
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic, **options)


def _op_by_op(graph: fx.GraphModule, lower: LowerLoops | None, recording: Recording | None) -> Call:
    """A function that runs a graph, called as AOTAutograd calls compiled graphs."""
    if lower is not None:
        lower(graph.graph)
    draw_in_order(graph.graph)
    graph.recompile()
    known = recording is not None and recording.joint is not None

    def run(given: list[Any]) -> Any:
        values = list(given)
        given.clear()
        if known and recording is not None:
            recording.seen(graph.graph, values)
        return AsTraced(graph).run(*values)

    return boxed(run)


# ---- graphs that run op by op -------------------------------------------------------------------
class AsTraced(fx.Interpreter):
    """Runs a graph op by op, with values laid out in memory as they were when it was traced.

    Some of torch's ops return other strides than their fake tensors have. Inductor keeps to the
    traced ones where an op asks for them, as the loops do when they read a value by its strides.
    Without a copy in these, the loops would read the right memory in the wrong order.
    """

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.known: dict[sympy.Symbol, int] = {}  # the sizes of this run

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        traced = n.meta.get("val")
        if n.op == "placeholder":
            self._learn(traced, result)
            return result
        if isinstance(result, tuple | list) and isinstance(traced, tuple | list):
            pairs = zip(result, traced, strict=True)
            return type(result)(self._as_traced(value, fake) for value, fake in pairs)
        return self._as_traced(result, traced)

    def _learn(self, traced: Any, value: Any) -> None:
        for symbolic, size in zip(_sizes(traced), _sizes(value), strict=False):
            expr = expression(symbolic)
            if isinstance(expr, sympy.Symbol):
                self.known[expr] = int(size)

    def _as_traced(self, value: Any, traced: Any) -> Any:
        if not isinstance(value, Tensor) or not isinstance(traced, Tensor):
            return value
        strides = [self._number(stride) for stride in traced.stride()]
        wanted = [stride for stride in strides if stride is not None]
        if len(wanted) < len(strides):
            return value
        sizes = enumerate(value.shape)
        if all(value.stride(dim) == wanted[dim] for dim, size in sizes if size != 1):
            return value
        laid_out = torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device)
        # a tensor that is not dense loses its strides
        is_dense = torch.empty_like(laid_out).stride() == laid_out.stride()
        return laid_out.copy_(value) if is_dense else value

    def _number(self, size: Size) -> int | None:
        """The size in this run; None if it depends on data."""
        if isinstance(size, int):
            return size
        found = expression(size).subs(self.known)
        return int(found) if found.is_Integer else None


def _sizes(value: Any) -> Sequence[Size]:
    if isinstance(value, Tensor):
        return value.shape
    return [value] if isinstance(value, int | torch.SymInt) else []


def draw_in_order(graph: fx.Graph) -> None:
    """Draw random numbers as eager does under `DrawInFloat32`, each by a seed of its own.

    Besides, run what waits for other nodes at its place: not every torch can outside of Inductor.
    """
    prims = torch.ops.prims
    for node in graph.nodes:
        if node.target is prims.inductor_seeds.default:
            node.target, node.args, node.kwargs = _seeds, node.args[:1], {}
        elif node.target is prims.inductor_random.default:
            node.target, node.args, node.kwargs = drawn, node.args[:3], {}
        elif str(node.target) == "control_deps":
            node.target = _at_its_place


def _at_its_place(waits_for: Any, body: Call, *operands: Any, **kwargs: Any) -> Any:
    return body(*operands, **kwargs)


def _seeds(count: int) -> Tensor:
    return torch.stack([new_seed() for _ in range(count)])


@contextlib.contextmanager
def forced_loops(setup: Case) -> Iterator[None]:
    """Loops that ``chunk_tokens`` asks for stay, as programs this small have none otherwise."""
    before = fewer_loops.FORCED_MAY_RAISE
    if setup.forced:
        fewer_loops.FORCED_MAY_RAISE = float("inf")
    try:
        yield
    finally:
        fewer_loops.FORCED_MAY_RAISE = before
