"""Checks of graphs, tensors and AOTAutograd; each gets the adapter as ``own``."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mstpass.torch_internals.versions import expect, find_or_none

aten = torch.ops.aten


# ---- ops and graphs ----------------------------------------------------------------------------
def op_types(own: Any) -> None:
    """What a node of an FX graph calls: ATen's and higher-order ops, and an op's schema."""
    add, add_ = aten.add.Tensor, aten.add_.Tensor
    expect(isinstance(add, own.OpOverload), "aten.add.Tensor is no OpOverload")
    expect(own.schema_of(add).name == "aten::add", "an op's schema has another name")
    arguments = [argument.name for argument in own.schema_of(add).arguments]
    expect(arguments == ["self", "other", "alpha"], "an op's schema has other arguments")
    writes = (own.schema_of(add).is_mutable, own.schema_of(add_).is_mutable)
    expect(writes == (False, True), "an op's schema does not say what the op writes to")
    views = tuple(map(own.returns_view, (add, add_, aten.view.default)))
    expect(views == (False, False, True), "an op's schema does not say what is a view")
    loop = torch.ops.higher_order.while_loop
    expect(isinstance(loop, own.HigherOrderOperator), "while_loop is no HigherOrderOperator")


def higher_order_ops(own: Any) -> None:
    """A higher-order op of our own: what it computes, and its results on fake tensors."""

    class Twice(own.HigherOrderOperator):
        def __call__(self, x: torch.Tensor) -> Any:
            return super().__call__(x)

    twice = Twice("mstpass_probe_twice", cacheable=True)
    own.implement(twice, eager=lambda x: x * 2, fake=lambda mode, x: x.new_empty(x.shape))
    expect(twice(torch.ones(2)).tolist() == [2, 2], "a higher-order op runs nothing")
    expect(twice.cacheable(), "a higher-order op is not cacheable")
    with own.FakeTensorMode() as mode:
        found = twice(torch.ones(3))
    expect(getattr(found, "fake_mode", None) is mode, "a higher-order op is not run as fake")


def op_calls(own: Any) -> None:
    """The call of an op as plain data: its name and its arguments."""
    name = own.name_of(aten.mm.default)
    expect(name == "aten::mm", f"aten.mm.default is called {name}")
    for name, arguments in own.HIGHER_ORDER_ARGUMENTS.items():
        op = getattr(torch.ops.higher_order, name)
        expect(own.name_of(op) == name, f"{name} is called {own.name_of(op)}")
        found = tuple(inspect.signature(op.__call__).parameters)[: len(arguments)]
        expect(found == arguments, f"the arguments of {name} are {', '.join(found)}")


def graph_modules(own: Any) -> None:
    """Graph modules that write their Python code when it is first needed.

    A graph that has changed is run as it is now.
    """
    graph = fx.Graph()
    given = graph.placeholder("given")
    output = graph.output(given)
    module = own.graph_module({}, graph)
    results = [float(module(torch.ones(())))]
    with graph.inserting_before(output):
        output.args = (graph.call_function(torch.neg, (given,)),)
    module.recompile()
    results.append(float(module(torch.ones(()))))
    expect(results == [1.0, -1.0], "a lazy graph module runs an earlier state of its graph")


def pytrees(own: Any) -> None:
    """The leaves of nested tuples, lists, dicts and whatever else is registered with torch."""
    tree = {"a": (1, [2]), "b": 3}
    expect(own.tree_leaves(tree) == [1, 2, 3], "tree_leaves gives other leaves")
    expect(own.tree_map(str, tree) == {"a": ("1", ["2"]), "b": "3"}, "tree_map maps otherwise")


def dtype_names(own: Any) -> None:
    """The short names of dtypes, as graphs that are printed have them."""
    names = [own.dtype_abbrs[dtype] for dtype in (torch.float32, torch.bfloat16, torch.bool)]
    expect(names == ["f32", "bf16", "b8"], "dtypes have other short names")


def opaque_values(own: Any) -> None:
    """Values of a graph that are neither tensors nor sizes, such as the mesh of a DTensor."""
    node = fx.Graph().placeholder("x")
    node.meta["val"] = 3
    expect(not own.is_opaque(node), "a number counts as an opaque value")


# ---- tensors and sizes -------------------------------------------------------------------------
def fake_tensors(own: Any) -> None:
    """Tensors without data, and what they raise where data would be needed."""
    mode = own.FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(torch.ones(2))
    expect(isinstance(fake, own.FakeTensor) and fake.fake_mode is mode, "a fake has no fake_mode")
    expect(hasattr(mode, "allow_scalar_outputs"), "FakeTensorMode has no allow_scalar_outputs")
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = fake
    with own.as_while_tracing(graph):
        found = own.TracingContext.try_get()
    expect(found is not None and found.fake_mode is mode, "a TracingContext has no fake_mode")
    for op, expected in (
        (torch.nonzero, own.DynamicOutputShapeException),
        (lambda value: value.sum().item(), own.DataDependentOutputException),
    ):
        with mode, contextlib.suppress(expected):
            op(fake)
            expect(False, f"fake tensors do not raise {expected.__name__}")


def dispatch_modes(own: Any) -> None:
    """See every op that runs, below autograd; and tell storages apart."""
    seen = set()

    class Names(own.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Names():
        x.exp().sum().backward()
    expected = {"aten.exp.default", "aten.sum.default", "aten.mul.Tensor"}
    expect(expected <= seen, f"a dispatch mode does not see {expected}")
    keys = [own.storage_key(t.untyped_storage()) for t in (x, x.view(2, 1), x.clone())]
    expect(keys[0] == keys[1] != keys[2], "storages cannot be told apart")


def wrapper_tensors(own: Any) -> None:
    """Tensors without memory, whose ops all go to ``__torch_dispatch__``."""

    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            raise InterruptedError

    made = own.without_storage(Empty, (2, 3), torch.bfloat16, torch.device("cpu"))
    known = (type(made), tuple(made.shape), made.dtype, made.requires_grad)
    expect(known == (Empty, (2, 3), torch.bfloat16, False), "a wrapper has other metadata")
    with contextlib.suppress(InterruptedError):
        made.sum()
        expect(False, "an op on a wrapper does not reach __torch_dispatch__")


def other_sizes(own: Any) -> None:
    """A symbol has another value, and a bound, as long as a block runs; guards go with it."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size: Any = mode.from_tensor(torch.ones(5), symbolic_context=dynamic).shape[0]
    (symbol,) = size.node.expr.free_symbols
    with own.at_sizes(environment, {symbol: 9}, {symbol: 9}) as conditions:
        (value,) = own.with_sizes([size])
        expect(own.hint(size) == 9 and own.most(value) == 9, "a symbol keeps its value or bound")
        expect(bool(value > 7), "a comparison uses the value of the first batch")
    expect(len(conditions) == 1 and not environment.guards, "a guard outlives its compilation")
    expect(own.hint(size) == 5 and own.most(size) is None, "a symbol keeps a value or bound")
    expect(not bool(size > 7), "a comparison uses the value of another batch")


def symbols(own: Any) -> None:
    """Sizes as the compiler sees them: their hints, and the names that they were given first."""
    from torch._inductor.sizevars import SizeVarAllocator

    shapes = ShapeEnv()
    size = shapes.create_unbacked_symint()
    own.set_hint(size, 7)
    found = SizeVarAllocator(shapes).optimization_hint(size.node.expr, fallback=0)
    expect(found == 7, f"a hint of 7 for an unknown size is read as {found}")
    names = (own.first_expression(size), own.first_expression(own.renamed(size)))
    expect(names == (size.node.expr,) * 2, "a size has another name than its own")


# ---- AOTAutograd -------------------------------------------------------------------------------
def partitioners(own: Any) -> None:
    """What torch's partitioner does besides choosing what is saved, and the partitioner itself."""
    budget_of = find_or_none("torch.fx.traceback._get_memory_budget_annotation")
    has_context = hasattr(torch.autograd.graph, "region_activation_memory_budget")
    missing = "torch.fx.traceback._get_memory_budget_annotation is missing"
    expect(budget_of is not None or not has_context, missing)
    gm = _joint_graph()
    own.merge_equal_nodes(gm)
    sines = [node for node in gm.graph.nodes if node.target is aten.sin.default]
    expect(len(sines) == 1, "fx_graph_cse does not merge equal nodes")
    modules = own.extract_forward_and_backward(gm, sines, [], 1, [])
    forward, backward = own.finish_forward_and_backward(*modules)
    returned = [node.target for node in forward.graph.output_node().all_input_nodes]
    ops = [aten.exp.default, aten.sin.default]
    expect(returned == ops, "_extract_fwd_bwd_modules: forward returns other values")
    inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    names = [sines[0].name, "tangents_1"]
    expect(inputs == names, "_extract_fwd_bwd_modules: backward has other inputs")
    write = forward.graph.call_function(aten.copy_.default)
    expect(not own.is_write_of_backward(write), "_must_be_in_backward: a write of the forward")
    write.meta["partitioner_tag"] = "must_be_in_backward"
    expect(own.is_write_of_backward(write), "_must_be_in_backward: a write of the backward")
    forward, _ = own.min_cut_rematerialization_partition(_joint_graph(), None, num_fwd_outputs=1)
    names = [node.name for node in forward.graph.output_node().args[0][1:]]
    wrong = "min_cut_rematerialization_partition: its choice is not found"
    expect(own.saved_by_torch(_joint_graph(), 1) == names, wrong)


def _joint_graph() -> fx.GraphModule:
    """Of ``exp(x)``, with a gradient that reads ``sin(x)`` twice."""
    graph = fx.Graph()
    x, tangent = (graph.placeholder(name) for name in ("primals_1", "tangents_1"))
    result = graph.call_function(aten.exp.default, (x,))
    for _ in range(2):
        sine = graph.call_function(aten.sin.default, (x,))
        tangent = graph.call_function(aten.mul.Tensor, (tangent, sine))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output((result, tangent))
    return fx.GraphModule(torch.nn.Module(), graph)


def donated_buffers(own: Any) -> None:
    """A loop's operands, which Inductor must not overwrite as if they were donated."""
    context = own.TracingContext
    expect(context.try_get() is None, "a TracingContext is there outside of tracing")
    expect(hasattr(context(None), "fw_metadata"), "TracingContext has no fw_metadata")


def kept_graphs(own: Any) -> None:
    """Backwards that keep their graph: ``retain_graph=True`` and ``create_graph=True``."""
    source = inspect.getsource(own.runtime_wrappers)
    used = "CompiledFunction._backward_impl"
    expect(used in source, f"the autograd function of a graph has no {used}")


def compiled_autograd(own: Any) -> None:
    """Whether compiled autograd is on: the backward is then traced and compiled a second time."""
    before = own.traces_backward_again()
    with own.compiled_autograd._enable(lambda gm: gm):
        within = own.traces_backward_again()
    expect(within, "compiled_autograd._enable does not set compiled_autograd_enabled")
    hooks = own.has_backward_hooks([1, own.BackwardState()]) and not own.has_backward_hooks([1])
    expect(hooks, "a BackwardState is not told from other inputs")
    expect(before == own.traces_backward_again(), "compiled autograd stays on")
