"""Checks of Inductor, host copies and the pretended GPU; each gets the adapter as ``own``."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import torch
from torch import fx

from mstpass.torch_internals.versions import expect

aten = torch.ops.aten


# ---- compile -----------------------------------------------------------------------------------
def plain_inductor(own: Any) -> None:
    """Compile a graph with Inductor and nothing else, and what its modes set."""
    found = own.options_of_mode("max-autotune")
    expect("max_autotune" in found, "a mode sets no max_autotune")


def inductor_lowerings(own: Any) -> None:
    """Tell Inductor how to lower an op: write a value to memory, or call the op as it is."""
    known = own.lowering.lowerings
    expect(aten.mm.default in known, "lowerings has no aten.mm")
    expect(aten.zeros.default in own.select_decomp_table(), "select_decomp_table has no aten.zeros")
    own.call_as_it_is(aten.addmm_.default)
    expect(aten.addmm_.default in known, "make_fallback does not register a lowering")


def control_dependencies(own: Any) -> None:
    """Order nodes of a graph that have no data in common, so that Inductor keeps the order."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    sine, cosine = (graph.call_function(op.default, (x,)) for op in (aten.sin, aten.cos))
    for node in (x, sine, cosine):
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output((sine, cosine))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    own.make_wait(gm.graph, {cosine: [sine]})
    waiting = [node for node in gm.graph.nodes if {x, sine} <= set(node.all_input_nodes)]
    named = [node.name for node in waiting] == [cosine.name]
    expect(bool(waiting), "preserve_node_ordering does not make a node wait")
    expect(named, "preserve_node_ordering gives the node another name")


def settings(own: Any) -> None:
    """Read and patch the settings of Inductor, AOTAutograd and Dynamo."""
    seen: list[bool] = []

    def look() -> None:
        seen.append(own.functorch_config.force_non_lazy_backward_lowering)

    look()
    with own.backward_compiled_at_once():
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    before, within, elsewhere, after = seen
    expect(within, "torch._functorch.config.patch changes nothing")
    expect(after == before, "torch._functorch.config.patch does not restore")
    expect(elsewhere == (before if own.PER_THREAD else True), "settings are shared otherwise")


def caches(own: Any) -> None:
    """What torch counts while it compiles, and a compile cache that is empty."""
    for group in ("stats", "aot_autograd", "inductor"):
        expect(own.counters[group]["mstpass_probe"] == 0, f"counters has no group {group}")
        del own.counters[group]["mstpass_probe"]


def compile_artifacts(own: Any) -> None:
    """Where torch puts what it writes about a compilation: trace, debug folder, compile cache."""
    expect(bool(own.get_aot_graph_name()), "get_aot_graph_name gives no name")
    expect(own.cache_folder().is_absolute(), "cache_dir gives no folder")
    own.trace_structured_artifact("mstpass_probe", "string", lambda: "")


# ---- attention --------------------------------------------------------------------------------
def attention_kernels(own: Any) -> None:
    """Which fused attention op the device's own dispatch chooses, and a call with a window."""
    for op in (aten._flash_attention_forward, aten._flash_attention_backward):
        known = {argument.name for argument in op.default._schema.arguments}
        expect(known >= {"window_size_left", "window_size_right"}, f"{op} has no window")


# ---- the scheduler -----------------------------------------------------------------------------
def scheduler_dependencies(own: Any) -> None:
    """Kernels wait for the loops whose results they read."""
    from torch._inductor.dependencies import ReadWrites
    from torch.utils._ordered_set import OrderedSet

    classes = own.SchedulerNode.__mro__
    known = any("mutation_renames" in vars(cls).get("__annotations__", {}) for cls in classes)
    expect(known, "torch._inductor.scheduler.SchedulerNode has no mutation_renames")
    reads = ReadWrites(OrderedSet([own.StarDep("old")]), OrderedSet(), OrderedSet())
    renamed = reads.with_read(own.StarDep("other")).rename({"old": "new"})
    names = {dep.name for dep in renamed.reads}
    expect(names == {"new", "other"}, "ReadWrites renames otherwise")


def results_in_place(own: Any) -> None:
    """Kernels that write over what a loop wrote, in place of memory that nothing needs."""
    from torch._inductor.codegen.common import Kernel, KernelArgs

    for owner, name in ((Kernel, "inplace_update_buffers"), (KernelArgs, "inplace_buffers")):
        known = name in owner.__init__.__code__.co_names
        expect(known, f"torch._inductor.codegen.common.{owner.__name__} has no {name}")


def vectorized_cpp(own: Any) -> None:
    """Two faults of Inductor's vectorized C++, mended for the graphs of one scheduler."""
    expect(hasattr(type(own.V), "local_buffer_context"), "V has no local_buffer_context")


# ---- reading the schedule ----------------------------------------------------------------------
def scheduled_loops(own: Any) -> None:
    """Whether the schedule runs the loops of a graph, each before what reads its results.

    That loops are found in real schedules is tested: tests/test_hook_checks.py.
    """
    from torch._inductor.graph import GraphLowering

    annotated = "device_types" in GraphLowering.__init__.__code__.co_names
    expect(annotated, "GraphLowering has no device_types")
    fields = own.ir.WhileLoop.__dataclass_fields__
    expect("cond_subgraph" in fields, "torch._inductor.ir.WhileLoop has no cond_subgraph")
    operands = inspect.signature(torch.ops.higher_order.while_loop.__call__).parameters
    expect(next(iter(operands)) == "cond_fn", "while_loop's first operand is no condition")


def inductor_schedule(own: Any) -> None:
    """Read the code that Inductor generates: what each line allocates and frees."""
    from mstpass.torch_internals.inductor import CustomSchedulerPass, compile_fx

    found: list[Any] = []

    class ReadOne(CustomSchedulerPass):
        """Reads one graph's code, and ends the compilation before kernels are made."""

        def __call__(self, nodes: list[Any]) -> list[Any]:
            own.around_code(nodes, self.read)
            return nodes

        def read(self, _: Any, write: Any) -> None:
            write()
            try:
                found.append(own.read_schedule())
            except Exception as error:
                found.append(error)
            raise InterruptedError

        def uuid(self) -> Any:
            return None

    module = fx.symbolic_trace(lambda x, weight: ((x @ weight).sin().sum(),))
    patches = {"_post_fusion_custom_pass": ReadOne(), "fx_graph_cache": False}
    with torch.no_grad(), contextlib.suppress(Exception):
        compile_fx(module, [torch.ones(64, 32), torch.ones(32, 16)], config_patches=patches)
    expect(bool(found), "_post_fusion_custom_pass is not called")
    schedule = found[0]
    expect(isinstance(schedule, own.Schedule), f"the schedule cannot be read: {schedule!r}")
    product, total = 64 * 16 * 4, 4
    allocated = [size for line in schedule.lines for size in line.allocated.values()]
    expect(allocated == [product, total], f"the schedule allocates {allocated} bytes")
    name = next(name for line in schedule.lines for name in line.allocated)
    freed = [name for line in schedule.lines for name in line.freed]
    expect(freed[-1:] == [name], f"the schedule frees {freed}")  # what comes before are inputs


# ---- the pretended GPU -------------------------------------------------------------------------
def pretended_gpu_engine(own: Any) -> None:
    """Differentiate fake CUDA tensors on a machine that has no CUDA device."""
    methods = own.virtual_methods()
    known = {"isBuilt", "hasPrimaryContext"} <= {*methods}
    first = methods[:1] == ["~AcceleratorHooksInterface"]
    expect(first and known, "AcceleratorHooksInterface has other virtual methods")
    expect(bool(own.cuda_hooks()), "at::detail::getCUDAHooks is missing")
