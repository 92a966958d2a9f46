"""Probes of what has torch believe in a GPU that is not there."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from mstpass.torch_internals.probes.row import NO_GPU, probe
from mstpass.torch_internals.versions import expect


@probe(
    "pretended_gpu",
    "torch._C: _only_lift_cpu_tensors, _set_only_lift_cpu_tensors",
    "torch._dynamo.device_interface: CudaInterface.Worker.get_device_properties",
    "torch._dynamo.device_interface: caching_worker_device_properties",
    "torch._dynamo.device_interface: caching_worker_current_devices",
    "torch._inductor.fx_passes: joint_graph.UniformValueConstantFolder._deduce_value",
    "torch._inductor.fx_passes: pad_mm._should_pad",
    "torch.fx.experimental: proxy_tensor.CONSTANT_NUMEL_LIMIT",
    "torch._subclasses.fake_tensor: FakeTensorMode.avoid_device_init, init_gpu_context",
    "torch.utils._triton: has_triton",
    lost=NO_GPU,
)
def pretended_gpu(own: Any) -> None:
    """A step is traced and compiled for a GPU that is not there."""


@probe(
    "pretended_gpu_attention",
    "torch.ops.aten: _scaled_dot_product_flash_attention",
    "torch.ops.aten: _scaled_dot_product_efficient_attention",
    "torch.ops.aten: _scaled_dot_product_cudnn_attention, _scaled_dot_product_attention_math",
    "torch.library: Library._destroy",
    lost=NO_GPU,
)
def pretended_gpu_attention(own: Any) -> None:
    """The kernel that CUDA would choose for ``scaled_dot_product_attention``."""


@probe(
    "pretended_gpu_engine",
    "torch.autograd: set_multithreading_enabled",
    "torch.backends.cuda: is_built",
    lost=NO_GPU,
)
def pretended_gpu_engine(own: Any) -> None:
    """Differentiate fake CUDA tensors on a machine that has no CUDA device."""
    methods = own.virtual_methods()
    known = {"isBuilt", "hasPrimaryContext"} <= {*methods}
    first = methods[:1] == ["~AcceleratorHooksInterface"]
    expect(first and known, "AcceleratorHooksInterface has other virtual methods")
    expect(bool(own.cuda_hooks()), "at::detail::getCUDAHooks is missing")


@probe(
    "pretended_triton",
    "torch._inductor.graph: GraphLowering.save_output_code",
    "torch._inductor.runtime.triton_heuristics: CachingAutotuner.precompile",
    "torch._inductor.runtime.triton_heuristics: CachingAutotuner._precompile_worker",
    "torch._inductor.runtime.triton_helpers: set_driver_to_gpu",
    "torch._inductor.config: fx_graph_cache",
    "torch._inductor.select_algorithm: AlgorithmSelectorCache.make_benchmark_fn",
    "torch._inductor.select_algorithm: TritonTemplateCaller",
    lost=NO_GPU,
    applies=lambda: find_spec("triton") is not None,
)
def pretended_triton(own: Any) -> None:
    """Compile a step for a pretended GPU: to the code that Inductor writes, and to cubins."""
