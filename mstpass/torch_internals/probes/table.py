"""The table of probes: one for each part of torch's private APIs that mstpass uses.

A *probe* asks an installed torch whether APIs are there and do what mstpass expects of them: their
names, the names of their parameters and, where that costs little, their behavior in a small case.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from mstpass.torch_internals.probes import of_frontend, of_graphs, of_inductor
from mstpass.torch_internals.versions import find

LOST = {
    "loops": "every step compiles as under Inductor",
    "schedule": "budgets are held to simulated peaks, and the order of kernels is not checked",
    "linter": "no step is linted",
    "traces": "the explainer, the planner and the linter trace no step of FSDP2",
    "speed": "a step that is explained for another device than its own is traced in more time",
    "sequences": "no sequence is shared by ranks",
    "plans": "no sequence that ranks share is planned",
    "gpu": "no step is planned or compiled for a GPU that is not there",
}
# Of each probe its name, the file of this package that it is for, what is lost where it fails, and
# where in torch the APIs are: a module or class, with what is needed of it. The check of behavior
# is the function of the same name in the files of checks.
_TABLE = """
op_types                graphs                  loops
    torch._ops: OpOverload
    torch.ops.aten.mm.default: _schema
higher_order_ops        graphs                  loops
    torch._higher_order_ops.utils: autograd_not_implemented(deferred_error)
    torch._ops: HigherOrderOperator(name, cacheable), HigherOrderOperator.py_impl,
        HigherOrderOperator.py_autograd_impl
    torch._C: DispatchKey.CompositeExplicitAutograd
    torch._subclasses.fake_tensor: FakeTensorMode
op_calls                graphs                  loops
    torch._ops: HigherOrderOperator.name
    torch._higher_order_ops.flex_attention: FlexAttentionHOP.__call__(query, key, value),
        FlexAttentionBackwardHOP.__call__(query, key, value, out, logsumexp, grad_out)
graph_modules           graphs                  loops
    torch.fx._lazy_graph_module: _LazyGraphModule
pytrees                 graphs                  loops
    torch.utils._pytree: tree_leaves, tree_map
opaque_values           graphs                  loops
    torch._library.fake_class_registry: FakeScriptObject
fake_tensors            fake_tensors            loops
    torch._subclasses.fake_tensor: FakeTensor, FakeTensorMode(allow_non_fake_inputs),
        FakeTensorMode.from_tensor, DataDependentOutputException, DynamicOutputShapeException,
        unset_fake_temporarily
    torch._guards: tracing(context), TracingContext(fake_mode)
    torch.fx.experimental.symbolic_shapes: ShapeEnv.suppress_guards
dispatch_modes          fake_tensors            loops
    torch.utils._python_dispatch: TorchDispatchMode
    torch: UntypedStorage._cdata
wrapper_tensors         fake_tensors            loops
    torch: Tensor._make_wrapper_subclass
other_sizes             batch_sizes             loops
    torch._dynamo.utils: preserve_rng_state
    torch._guards: TracingContext.try_get, tracing
    torch._subclasses.fake_tensor: FakeTensor
    torch.fx.experimental.symbolic_shapes: ShapeEnv.bound_sympy, ShapeEnv.create_symintnode(hint)
    torch.utils._sympy.value_ranges: ValueRanges
symbols                 fake_tensors            loops
    torch.fx.experimental.symbolic_shapes: ShapeEnv.create_unbacked_symint,
        ShapeEnv.create_symintnode(hint)
    torch.fx.experimental.sym_node: SymNode.expr
    torch._inductor.sizevars: SizeVarAllocator.optimization_hint(fallback)
partitioners            aot_autograd            loops
    torch._functorch.partitioners: min_cut_rematerialization_partition(num_fwd_outputs,
        static_lifetime_input_indices),
        _must_be_in_backward(node),
        _extract_fwd_bwd_modules(saved_sym_nodes, num_fwd_outputs, static_lifetime_input_nodes),
        thread_graphsafe_rng_from_hops(is_backward)
    torch._functorch.compile_utils: fx_graph_cse, raise_getitems
    torch.utils._ordered_set: OrderedSet
donated_buffers         aot_autograd            loops
    torch._guards: TracingContext.try_get
    torch._functorch._aot_autograd.schemas: ViewAndMutationMeta.bw_donated_idxs
    torch._inductor.graph: SubgraphLowering
    torch._inductor.utils: get_donated_idxs
    torch._inductor.virtualized: V
kept_graphs             aot_autograd            loops
    torch._functorch._aot_autograd.runtime_wrappers: RuntimeWrapper.post_compile(compiled_fn)
    torch._C._autograd: _get_current_graph_task_keep_graph
compiled_autograd       aot_autograd            loops
    torch._dynamo.config: compiled_autograd
    torch._dynamo.compiled_autograd: compiled_autograd_enabled, _enable(compiler_fn)
    torch.fx.experimental._backward_state: BackwardState
dynamo                  dynamo                  loops
    torch._C._dynamo.eval_frame: _debug_get_cache_entry_list, reset_code
    torch._dynamo.convert_frame: register_bytecode_hook(hook)
    torch._dynamo.exc: RestartAnalysis, TorchDynamoException, Unsupported
    torch._dynamo: maybe_mark_dynamic
    torch._dynamo.output_graph: GraphCompileReason(reason, user_stack, graph_break)
    torch._subclasses.fake_tensor: log
    torch._dynamo.variables.tensor: log
    torch._dynamo.variables.ctx_manager: log
default_device          default_device          speed
    torch.utils._device: DeviceContext, _device_constructors
    torch._dynamo.variables.torch_function: SymbolicTorchFunctionState._pop_mode_for_inlining,
        SymbolicTorchFunctionState.call_torch_function_mode(tx, fn, types, args, kwargs)
checkpoint_frames       dynamo                  linter
    torch.nn: Module._call_impl
    torch.autograd: backward
    torch.autograd.graph: _engine_run_backward
    torch.utils.checkpoint: CheckpointFunction.forward(ctx), CheckpointFunction.backward(ctx),
        _checkpoint_impl(function, use_reentrant) | checkpoint(function, use_reentrant),
        _checkpoint_without_reentrant_generator_impl(fn)
        | _checkpoint_without_reentrant_generator(fn)
    torch._C: _current_graph_task_id
modules                 modules                 loops
    torch._dynamo.eval_frame: OptimizedModule
    torch.nn: Module._apply(fn, recurse), Module._compiled_call_impl
    torch.distributed.fsdp._common_utils: FSDP_WRAPPED_MODULE
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper: _CHECKPOINT_WRAPPED_MODULE
fsdp_states             modules                 traces
    torch.distributed.fsdp: FSDPModule._get_fsdp_state
collective_ops          collectives             loops
    torch.ops: _c10d_functional, _dtensor
exchanges               exchanges               sequences
    torch.distributed._functional_collectives: all_to_all_single(self, output_split_sizes,
        input_split_sizes, group), all_to_all_single_autograd(self, output_split_sizes,
        input_split_sizes, group), wait_tensor
pretended_ranks         pretended_ranks         plans
    torch.testing._internal.distributed.fake_pg: FakeStore
attention_blocks        attention_blocks        sequences
    torch.ops.aten: _scaled_dot_product_flash_attention_for_cpu,
        _scaled_dot_product_flash_attention_for_cpu_backward, _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward, _flash_attention_forward,
        _flash_attention_backward
compiler_collectives    collectives             loops
    torch._dynamo.config: enable_compiler_collectives
    torch._dynamo.distributed: get_compile_pg
    torch._guards: CompileContext.current_compile_id, CompileId
    torch._subclasses.fake_tensor: unset_fake_temporarily
    torch.distributed.distributed_c10d: _get_default_store, _resolve_process_group
    torch.utils._mode_utils: no_dispatch
data_parallel           collectives             loops
    torch._dynamo.backends.distributed: propagate_dynamo_source
    torch.nn.parallel: DistributedDataParallel._get_active_ddp_module
ddp_buckets             collectives             loops
    torch._dynamo.backends.distributed: SubmodCompiler.run_node(n), DDPOptimizer.compile_fn(gm)
compile_fx              inductor                loops
    torch._inductor.compile_fx: compile_fx(inner_compile, config_patches), compile_fx_inner
    torch._inductor.custom_graph_pass: CustomGraphPass.uuid, CustomPartitionerFn.uuid
    torch._inductor: custom_graph_pass.CustomSchedulerPass | config._post_fusion_custom_pass
    torch._inductor.config: custom_partitioner_fn, post_grad_custom_pre_pass,
        post_grad_custom_post_pass, _pre_fusion_custom_pass, _post_fusion_custom_pass
plain_inductor          plain_inductor          loops
    torch._inductor: compile(gm, example_inputs, options), list_mode_options(mode)
inductor_lowerings      inductor                loops
    torch._inductor.lowering: lowerings, register_lowering(type_promotion_kind),
        make_fallback(warn), fallback_handler
    torch._inductor.graph: GraphLowering
    torch._inductor.virtualized: V
    torch._inductor.ir: StorageBox.realize
    torch._inductor.decomposition: select_decomp_table
control_dependencies    inductor                loops
    torch._inductor.fx_passes.control_dependencies: control_deps, preserve_node_ordering
    torch.utils._ordered_set: OrderedSet
settings                settings                loops
    torch._inductor.config: _config, patch, get_config_copy, fx_graph_cache, compile_threads,
        post_grad_custom_pre_pass, shape_padding, force_shape_pad
    torch._functorch.config: patch, activation_memory_budget, cse, enable_autograd_cache,
        force_non_lazy_backward_lowering
    torch._dynamo.config: patch, automatic_dynamic_shapes, error_on_recompile,
        run_gc_after_compile
caches                  caches                  loops
    torch._dynamo.utils: counters
    torch._inductor.metrics: num_auto_chunking
    torch._inductor.utils: fresh_cache
compile_artifacts       caches                  loops
    torch._inductor.config.trace: enabled, debug_dir
    torch._dynamo.utils: get_debug_dir
    torch._functorch._aot_autograd.logging_utils: get_aot_graph_name
    torch._inductor.runtime.cache_dir_utils: cache_dir
    torch._logging._internal: trace_structured_artifact(name, encoding, payload_fn)
    torch._logging._internal: trace_log.handlers
host_copy_ops           host_copy_ops           loops
    torch.accelerator: current_stream, set_stream
attention_kernels       attention_kernels       loops
    torch.ops.aten: _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward, _scaled_dot_product_cudnn_attention,
        _scaled_dot_product_cudnn_attention_backward, _flash_attention_forward,
        _flash_attention_backward
scheduler_mends         scheduler_mends         loops
    torch._inductor.config: _pre_fusion_custom_pass
    torch._inductor.scheduler: BaseSchedulerNode.get_nodes, SchedulerNode
    torch._inductor.virtualized: V
    torch._inductor.dependencies: Dep.numbytes_hint, Dep.numel_hint
    torch._inductor.graph: GraphLowering.get_dep_size_hint(dep, count_bytes)
    torch._inductor.sizevars: SizeVarAllocator
    torch.fx.experimental.symbolic_shapes: free_unbacked_symbols
scheduler_dependencies  scheduler_mends         loops
    torch._inductor.scheduler: SchedulerNode.recompute_size_and_body,
        SchedulerNode.set_read_writes
    torch._inductor.dependencies: ReadWrites.with_read, ReadWrites.rename, StarDep, WeakDep
    torch.utils._ordered_set: OrderedSet
results_in_place        scheduler_mends         loops
    torch._inductor.scheduler: SchedulerNode.decide_inplace_update, NodeUser(can_inplace)
    torch._inductor.codegen.common: Kernel, KernelArgs, InplacedBuffer.other_names
    torch._inductor.codegen.wrapper: can_match_buffer_size(input_buf, output_buf)
    torch._inductor.ir: MutationOutput, NoneLayout
vectorized_cpp          scheduler_mends         loops
    torch._inductor.config.cpp: dynamic_threads
    torch._inductor.codegen.cpp: CppKernel, CppKernelProxy.tile2d_kernel_cls,
        CppScheduling.codegen_outer_loop_node(node), CppScheduling.kernel_proxy_cls,
        CppTile2DKernel.need_vec_transpose, CppTile2DKernel.store(name, index, value, mode),
        CppVecKernel.store(name, index, value, mode), LoopLevel(steps), LoopNest(loops),
        OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr(cpp_kernel_proxy_list,
        outer_loop_fusion_depth)
    torch._inductor.scheduler: Scheduler.get_backend
    torch.utils._sympy.symbol: SymT.TMP, free_symbol_is_type
kernel_order            inductor_kernels        schedule
    torch._inductor.config: reorder_for_peak_memory
    torch._inductor.graph: GraphLowering.add_device_info
    torch._inductor.memory: reorder_for_peak_memory
    torch._inductor.virtualized: V
    torch.utils._ordered_set: OrderedSet
scheduled_loops         inductor_kernels        schedule
    torch._inductor.dependencies: WeakDep
    torch._inductor.graph: GraphLowering.run_node
    torch._inductor.ir: WhileLoop
    torch._inductor.scheduler: BaseSchedulerNode.get_nodes, BaseSchedulerNode.get_outputs,
        SchedulerBuffer.get_mutations
local_buffers           inductor_kernels        schedule
    torch._inductor.codegen.cpp: OuterLoopFusedSchedulerNode.get_outer_nodes
    torch._inductor.loop_body: LoopBody.get_read_expr(buffer_name),
        LoopBody.get_write_expr(buffer_name)
    torch._inductor.scheduler: SchedulerNode
triton_kernels          inductor_kernels        schedule
    torch._inductor.choices: InductorChoices.should_use_persistent_reduction(features,
        cooperative_reduction)
    torch._inductor.codegen.cuda_combined_scheduling: CUDACombinedScheduling
    torch._inductor.codegen.simd: SIMDScheduling.generate_node_schedule(nodes, numel, rnumel)
    torch._inductor.codegen.simd_kernel_features: EnableReduction,
        MemoryEstimator(features, groups),
        SIMDKernelFeatures(node_schedule, numel, reduction_numel)
    torch._inductor.config.triton: mix_order_reduction_split_size
    torch._inductor.runtime.hints: DeviceProperties.create
    torch._inductor.runtime.runtime_utils: last_power_of_2
    torch._inductor.scheduler: FusedMixOrderReductions, FusedSchedulerNode,
        MixOrderReduction.get_numel_rnumel, Scheduler.get_backend
inductor_schedule       inductor_schedule       schedule
    torch._inductor.config: _post_fusion_custom_pass
    torch._inductor.codegen.wrapper: can_match_buffer_size
    torch._inductor.graph: GraphLowering.get_allocation_storage_size, SubgraphLowering,
        GraphLowering.get_output_names
    torch._inductor.ir: FallbackKernel(unflatten_args), InvokeSubgraph, WhileLoop, MultiOutput,
        MultiOutputLayout, MutationLayoutSHOULDREMOVE, NonOwningLayout, NoneLayout,
        Switch | Conditional,
        Operation.get_inputs_that_alias_output | Buffer.get_inputs_that_alias_output
    torch._inductor.scheduler: BaseSchedulerNode.used_or_aliased_buffer_names,
        NopKernelSchedulerNode, OutputNode, SchedulerBuffer.can_free
    torch._inductor.sizevars: SizeVarAllocator.optimization_hint(fallback)
    torch._inductor.virtualized: V
    torch.fx.experimental.symbolic_shapes: free_unbacked_symbols
pretended_gpu           pretended_gpu           gpu
    torch._C: _only_lift_cpu_tensors, _set_only_lift_cpu_tensors
    torch._dynamo.device_interface: CudaInterface.Worker.get_device_properties,
        caching_worker_device_properties, caching_worker_current_devices
    torch._inductor.fx_passes.joint_graph: UniformValueConstantFolder._deduce_value
    torch._inductor.fx_passes.pad_mm: _should_pad
    torch.fx.experimental.proxy_tensor: CONSTANT_NUMEL_LIMIT
    torch._subclasses.fake_tensor: FakeTensorMode.avoid_device_init, init_gpu_context
    torch.utils._triton: has_triton
pretended_gpu_attention pretended_gpu_attention gpu
    torch.ops.aten: _scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention,
        _scaled_dot_product_cudnn_attention, _scaled_dot_product_attention_math
    torch.library: Library._destroy
pretended_gpu_engine    pretended_gpu_engine    gpu
    torch.autograd: set_multithreading_enabled
    torch.backends.cuda: is_built
pretended_triton        pretended_triton        gpu
    torch._inductor.graph: GraphLowering.save_output_code
    torch._inductor.runtime.triton_heuristics: CachingAutotuner.precompile,
        CachingAutotuner._precompile_worker
    torch._inductor.runtime.triton_helpers: set_driver_to_gpu
    torch._inductor.config: fx_graph_cache
    torch._inductor.select_algorithm: AlgorithmSelectorCache.make_benchmark_fn,
        TritonTemplateCaller
"""
# What not every build of torch has; without it there is nothing to ask for.
_APPLIES: dict[str, Callable[[], bool]] = {
    "fsdp_states": torch.distributed.is_available,
    "data_parallel": torch.distributed.is_available,
    "pretended_ranks": torch.distributed.is_available,
    "pretended_triton": lambda: find_spec("triton") is not None,
}
_COMMA = re.compile(r", (?![^(]*\))")  # none between parameters


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a part of an adapter needs of torch.

    Attributes:
        adapter: the file of mstpass/torch_internals, without ``.py``.
        lost: what mstpass does without it; a key of ``LOST``.
        apis: as versions.py describes them.
        check: a check of behavior, which gets the adapter.
    """

    name: str
    adapter: str
    lost: str
    apis: tuple[str, ...]
    check: Callable[[Any], None]

    @property
    def purpose(self) -> str:
        """What the part is for."""
        return (inspect.getdoc(self.check) or "").partition("\n")[0]

    def require(self) -> None:
        """Check that all APIs exist and have their parameters.

        Raises:
            TorchChangedError: one does not.
        """
        for api in self.apis if _APPLIES.get(self.name, lambda: True)() else ():
            find(api)

    def run(self) -> None:
        """Check the APIs, and what they do.

        Raises:
            Exception: torch lacks one, or does something else.
        """
        adapter = importlib.import_module(f"mstpass.torch_internals.{self.adapter}")
        self.require()
        self.check(adapter)


def _rows() -> Iterator[Probe]:
    checks = {**vars(of_graphs), **vars(of_frontend), **vars(of_inductor)}
    for row in re.split(r"\n(?=\w)", _TABLE.strip()):
        head, *where = re.split(r"\n {4}(?=\w)", row)
        name, adapter, lost = head.split()
        homes = (" ".join(text.split()).split(": ") for text in where)
        apis = [
            f"{home}.{api.replace(' | ', f' | {home}.')}"
            for home, names in homes
            for api in _COMMA.split(names)
        ]
        yield Probe(name, adapter, lost, tuple(apis), checks[name])


PROBES = tuple(_rows())
(HOOKS,) = (probe for probe in PROBES if probe.name == "compile_fx")  # whether they are called
