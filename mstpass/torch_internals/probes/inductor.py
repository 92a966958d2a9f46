"""Probes of Inductor: its hooks, settings, caches, scheduler and kernels; and of host copies."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import torch
from torch import fx

from mstpass.torch_internals.probes.row import SCHEDULE, probe
from mstpass.torch_internals.versions import expect

aten = torch.ops.aten


# ---- compile -----------------------------------------------------------------------------------
@probe(
    "inductor",
    "torch._inductor.compile_fx: compile_fx(inner_compile, config_patches)",
    "torch._inductor.custom_graph_pass: CustomGraphPass.uuid, CustomPartitionerFn.uuid",
    # CustomSchedulerPass is not in 2.11
    "torch._inductor: custom_graph_pass.CustomSchedulerPass | config._post_fusion_custom_pass",
    "torch._inductor.config: custom_partitioner_fn, post_grad_custom_pre_pass",
    "torch._inductor.config: post_grad_custom_post_pass",
    "torch._inductor.config: _pre_fusion_custom_pass, _post_fusion_custom_pass",
)
def compile_fx(own: Any) -> None:
    """Compile a graph with Inductor, with passes at its hooks."""
    inputs: list[str] = []
    names: set[str] = set()

    class Partitioner(own.CustomPartitionerFn):
        """Keeps what it is called with, and ends the compilation."""

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:
            inputs.extend(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
            names.update(given)
            raise InterruptedError

        def uuid(self) -> Any:
            return None

    module = fx.symbolic_trace(lambda x: (x.sin().sum(),))
    weight = torch.ones(2, requires_grad=True)
    with contextlib.suppress(Exception):  # whatever torch makes of the error
        own.compile_fx(module, [weight], config_patches={"custom_partitioner_fn": Partitioner()})
    expected, given = (
        ["primals_1", "tangents_1"],
        {"num_fwd_outputs", "static_lifetime_input_indices"},
    )
    expect(bool(inputs), "custom_partitioner_fn is not called by compile_fx")
    expect(inputs == expected, f"the joint graph's inputs are not named {expected}")
    expect(given <= names, f"a partitioner is not given {sorted(given)}")


@probe(
    "plain_inductor",
    "torch._inductor: compile(gm, example_inputs, options), list_mode_options(mode)",
)
def plain_inductor(own: Any) -> None:
    """Compile a graph with Inductor and nothing else, and what its modes set."""
    found = own.options_of_mode("max-autotune")
    expect("max_autotune" in found, "a mode sets no max_autotune")


@probe(
    "inductor",
    "torch._inductor.lowering: lowerings, register_lowering(type_promotion_kind)",
    "torch._inductor.lowering: make_fallback(warn), fallback_handler",
    "torch._inductor: graph.GraphLowering, virtualized.V, ir.StorageBox.realize",
    "torch._inductor.decomposition: select_decomp_table",
)
def inductor_lowerings(own: Any) -> None:
    """Tell Inductor how to lower an op: write a value to memory, or call the op as it is."""
    known = own.lowering.lowerings
    expect(aten.mm.default in known, "lowerings has no aten.mm")
    expect(aten.zeros.default in own.select_decomp_table(), "select_decomp_table has no aten.zeros")
    own.call_as_it_is(aten.addmm_.default)
    expect(aten.addmm_.default in known, "make_fallback does not register a lowering")


@probe(
    "inductor",
    "torch._inductor.fx_passes.control_dependencies: preserve_node_ordering",
    "torch.utils._ordered_set: OrderedSet",
)
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


@probe(
    "settings",
    "torch._inductor.config: _config, patch, get_config_copy, fx_graph_cache, compile_threads",
    "torch._inductor.config: post_grad_custom_pre_pass, shape_padding, force_shape_pad",
    "torch._functorch.config: patch, activation_memory_budget, cse, enable_autograd_cache",
    "torch._functorch.config: force_non_lazy_backward_lowering",
    "torch._dynamo.config: patch, automatic_dynamic_shapes, error_on_recompile",
    "torch._dynamo.config: run_gc_after_compile",
)
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


@probe(
    "caches",
    "torch._dynamo.utils: counters",
    "torch._inductor: metrics.num_auto_chunking, utils.fresh_cache",
)
def caches(own: Any) -> None:
    """What torch counts while it compiles, and a compile cache that is empty."""
    for group in ("stats", "aot_autograd", "inductor"):
        expect(own.counters[group]["mstpass_probe"] == 0, f"counters has no group {group}")
        del own.counters[group]["mstpass_probe"]


@probe(
    "caches",
    "torch._inductor.config: trace.enabled, trace.debug_dir",
    "torch._dynamo.utils: get_debug_dir",
    "torch._functorch._aot_autograd.logging_utils: get_aot_graph_name",
    "torch._inductor.runtime.cache_dir_utils: cache_dir",
    "torch._logging._internal: trace_structured_artifact(name, encoding, payload_fn)",
)
def compile_artifacts(own: Any) -> None:
    """Where torch puts what it writes about a compilation: trace, debug folder, compile cache."""
    expect(bool(own.get_aot_graph_name()), "get_aot_graph_name gives no name")
    expect(own.cache_folder().is_absolute(), "cache_dir gives no folder")
    own.trace_structured_artifact("mstpass_probe", "string", lambda: "")


# ---- host copies and attention -----------------------------------------------------------------
@probe("host_copy_ops", "torch.accelerator: current_stream, set_stream")
def host_copy_ops(own: Any) -> None:
    """The ops that copy a value from a GPU to the host and back, beside computation."""
    expected = {
        "offload": ["tensor"],
        "reload": ["tensor", "device", "original_size", "original_stride"],
        "wait_tensor": ["tensor", "keepalive", "last_use_of_storage"],
    }
    schemas = [op._schema for op in own.all_ops()]
    names = [schema.name.partition("::")[2] for schema in schemas]
    expect(names == [*expected], f"copies are named {names}")
    for schema, arguments in zip(schemas, expected.values(), strict=True):
        found = [argument.name for argument in schema.arguments]
        expect(found == arguments, f"{schema.name} has the arguments {found}")


@probe(
    "attention_kernels",
    "torch.utils._python_dispatch: TorchDispatchMode",
    "torch.ops.aten: _scaled_dot_product_flash_attention",
    "torch.ops.aten: _scaled_dot_product_flash_attention_backward",
    "torch.ops.aten: _scaled_dot_product_cudnn_attention",
    "torch.ops.aten: _scaled_dot_product_cudnn_attention_backward",
    "torch.ops.aten: _flash_attention_forward, _flash_attention_backward",
)
def attention_kernels(own: Any) -> None:
    """Which fused attention op the device's own dispatch chooses, and a call with a window."""
    for op in (aten._flash_attention_forward, aten._flash_attention_backward):
        known = {argument.name for argument in op.default._schema.arguments}
        expect(known >= {"window_size_left", "window_size_right"}, f"{op} has no window")


# ---- the scheduler -----------------------------------------------------------------------------
@probe(
    "scheduler_mends",
    "torch._inductor.config: _pre_fusion_custom_pass",
    "torch._inductor.scheduler: BaseSchedulerNode.get_nodes, SchedulerNode",
    "torch._inductor.virtualized: V",
    "torch._inductor.dependencies: Dep.numbytes_hint, Dep.numel_hint",
    "torch._inductor.graph: GraphLowering.get_dep_size_hint(dep, count_bytes)",
    "torch._inductor.sizevars: SizeVarAllocator",
    "torch.fx.experimental.symbolic_shapes: free_unbacked_symbols",
)
def scheduler_mends(own: Any) -> None:
    """Inductor's pass before fusion, in which its scheduler is mended."""


@probe(
    "scheduler_mends",
    "torch._inductor.scheduler: SchedulerNode.recompute_size_and_body",
    "torch._inductor.scheduler: SchedulerNode.set_read_writes",
    "torch._inductor.dependencies: ReadWrites.with_read, ReadWrites.rename, StarDep, WeakDep",
    "torch.utils._ordered_set: OrderedSet",
)
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


@probe(
    "scheduler_mends",
    "torch._inductor.config: cpp.dynamic_threads",
    "torch._inductor.codegen.cpp: CppKernel, CppKernelProxy.tile2d_kernel_cls",
    "torch._inductor.codegen.cpp: CppScheduling.codegen_outer_loop_node(node)",
    "torch._inductor.codegen.cpp: CppScheduling.kernel_proxy_cls",
    "torch._inductor.codegen.cpp: CppTile2DKernel.need_vec_transpose",
    "torch._inductor.codegen.cpp: CppTile2DKernel.store(name, index, value, mode)",
    "torch._inductor.codegen.cpp: CppVecKernel.store(name, index, value, mode)",
    "torch._inductor.codegen.cpp: LoopLevel(steps), LoopNest(loops)",
    "torch._inductor.codegen.cpp: OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr"
    "(cpp_kernel_proxy_list, outer_loop_fusion_depth)",
    "torch._inductor.scheduler: Scheduler.get_backend",
    "torch.utils._sympy.symbol: SymT.TMP, free_symbol_is_type",
)
def vectorized_cpp(own: Any) -> None:
    """Two faults of Inductor's vectorized C++, mended for the graphs of one scheduler."""
    expect(hasattr(type(own.V), "local_buffer_context"), "V has no local_buffer_context")


# ---- reading the schedule ----------------------------------------------------------------------
@probe(
    "inductor_kernels",
    "torch._inductor.config: reorder_for_peak_memory",
    "torch._inductor.graph: GraphLowering.add_device_info",
    "torch._inductor.memory: reorder_for_peak_memory",
    "torch._inductor.virtualized: V",
    "torch.utils._ordered_set: OrderedSet",
    lost=SCHEDULE,
)
def kernel_order(own: Any) -> None:
    """The devices of the graph that Inductor schedules, and the order of its kernels."""
    from torch._inductor.graph import GraphLowering

    annotated = "device_types" in GraphLowering.__init__.__code__.co_names
    expect(annotated, "GraphLowering has no device_types")


@probe(
    "inductor_kernels",
    "torch._inductor.dependencies: WeakDep",
    "torch._inductor.graph: GraphLowering.run_node",  # an interpreter of the graph it has
    "torch._inductor.ir: WhileLoop",
    "torch._inductor.scheduler: BaseSchedulerNode.get_nodes, BaseSchedulerNode.get_outputs",
    "torch._inductor.scheduler: SchedulerBuffer.get_mutations",
    lost=SCHEDULE,
)
def scheduled_loops(own: Any) -> None:
    """Whether the schedule runs the loops of a graph, each before what reads its results.

    That loops are found in real schedules is tested: tests/test_hook_checks.py.
    """
    fields = own.ir.WhileLoop.__dataclass_fields__
    expect("cond_subgraph" in fields, "torch._inductor.ir.WhileLoop has no cond_subgraph")
    operands = inspect.signature(torch.ops.higher_order.while_loop.__call__).parameters
    expect(next(iter(operands)) == "cond_fn", "while_loop's first operand is no condition")


@probe(
    "inductor_kernels",
    "torch._inductor.codegen.cpp: OuterLoopFusedSchedulerNode.get_outer_nodes",
    "torch._inductor.loop_body: LoopBody.get_read_expr(buffer_name)",
    "torch._inductor.loop_body: LoopBody.get_write_expr(buffer_name)",
    "torch._inductor.scheduler: SchedulerNode",
    lost=SCHEDULE,
)
def local_buffers(own: Any) -> None:
    """Which values stay inside of one C++ kernel that Inductor made of several loop nests."""


@probe(
    "inductor_kernels",
    "torch._inductor.choices: InductorChoices.should_use_persistent_reduction"
    "(features, cooperative_reduction)",
    "torch._inductor.codegen.cuda_combined_scheduling: CUDACombinedScheduling",
    "torch._inductor.codegen.simd: SIMDScheduling.generate_node_schedule(nodes, numel, rnumel)",
    "torch._inductor.codegen.simd_kernel_features: EnableReduction",
    "torch._inductor.codegen.simd_kernel_features: MemoryEstimator(features, groups)",
    "torch._inductor.codegen.simd_kernel_features: SIMDKernelFeatures"
    "(node_schedule, numel, reduction_numel)",
    "torch._inductor.config: triton.mix_order_reduction_split_size",
    "torch._inductor.runtime: hints.DeviceProperties.create, runtime_utils.last_power_of_2",
    "torch._inductor.scheduler: FusedMixOrderReductions, FusedSchedulerNode",
    "torch._inductor.scheduler: MixOrderReduction.get_numel_rnumel, Scheduler.get_backend",
    lost=SCHEDULE,
)
def triton_kernels(own: Any) -> None:
    """What memory Triton kernels take, besides what a schedule says of their buffers."""
    from torch._inductor.codegen.cuda_combined_scheduling import CUDACombinedScheduling

    fields = CUDACombinedScheduling.__init__.__code__.co_names
    expect("_triton_scheduling" in fields, "CUDACombinedScheduling has other schedulers")


@probe(
    "inductor_schedule",
    "torch._inductor.config: _post_fusion_custom_pass",
    "torch._inductor.codegen.wrapper: can_match_buffer_size",
    "torch._inductor.graph: GraphLowering.get_allocation_storage_size, SubgraphLowering",
    "torch._inductor.graph: GraphLowering.get_output_names",
    "torch._inductor.ir: FallbackKernel(unflatten_args), InvokeSubgraph, WhileLoop",
    "torch._inductor.ir: MultiOutput, MultiOutputLayout, MutationLayoutSHOULDREMOVE",
    "torch._inductor.ir: NonOwningLayout, NoneLayout, Switch | Conditional",
    "torch._inductor.ir: Operation.get_inputs_that_alias_output"
    " | Buffer.get_inputs_that_alias_output",
    "torch._inductor.scheduler: BaseSchedulerNode.used_or_aliased_buffer_names",
    "torch._inductor.scheduler: NopKernelSchedulerNode, OutputNode, SchedulerBuffer.can_free",
    "torch._inductor.sizevars: SizeVarAllocator.optimization_hint(fallback)",
    "torch._inductor.virtualized: V",
    "torch.fx.experimental.symbolic_shapes: free_unbacked_symbols",
    lost=SCHEDULE,
)
def inductor_schedule(own: Any) -> None:
    """Read Inductor's schedule after fusion: what each call allocates, overwrites and frees."""
    from mstpass.torch_internals.inductor import CustomSchedulerPass, compile_fx
    from mstpass.torch_internals.inductor_kernels import in_final_order

    found: list[Any] = []

    class ReadOne(CustomSchedulerPass):
        """Reads one graph's schedule, and ends the compilation before code is written."""

        def __call__(self, nodes: list[Any]) -> list[Any]:
            try:
                found.append(own.read_schedule(in_final_order(nodes)))
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
    allocated = [size for call in schedule.calls for size in call.allocated.values()]
    expect(allocated == [product, total], f"the schedule allocates {allocated} bytes")
    freed = [len(call.freed) for call in schedule.calls]
    expect(freed == [2, 1], f"the schedule frees {freed} buffers")
