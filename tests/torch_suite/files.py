"""The test files of PyTorch that are run with the backend's name changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

OWN = Path(__file__).with_name("loss_opinfos.py")


@dataclasses.dataclass(frozen=True)
class SuiteFile:
    """One file.

    Attributes:
        path: relative to the folder ``test`` of PyTorch's sources; absolute for a file of ours.
        about: what it tests.
        chosen: an expression of pytest's ``-k``; empty for all tests.
        on_cpu: the CPU takes the place of a GPU that the tests name.
    """

    path: str
    about: str
    chosen: str = ""
    on_cpu: bool = True

    @property
    def name(self) -> str:
        return Path(self.path).name if Path(self.path).is_absolute() else self.path


# The tests of all operators and modules under AOTAutograd alone, and of export, run no partitioner.
_NO_PARTITIONER = "not OpInfo and not ModuleInfo and not Export"
# The others compile nothing, or differ in what happens before a backend is called.
_COMPILED_SCANS = (
    "not xpu and (aot_eager or (autograd_True and compile_mode_compile and not compile_dynamic "
    "and not pointwise and not reverse_True))"
)
# The others test single ops without gradients, or need Triton.
_DYNAMIC = (
    "DynamicShapesCpuTests and (backward or grad or dropout or softmax or embedding or scatter "
    "or norm or bmm or attention)"
)

FILES = (
    SuiteFile("functorch/test_aotdispatch.py", "AOTAutograd", _NO_PARTITIONER),
    SuiteFile("dynamo/test_aot_autograd.py", "AOTAutograd under Dynamo"),
    SuiteFile("dynamo/test_aot_autograd_cache.py", "AOTAutograd's cache"),
    SuiteFile("functorch/test_aot_joint_with_descriptors.py", "AOTAutograd in stages"),
    SuiteFile("functorch/test_memory_efficient_fusion.py", "partitioner: fewest saved bytes"),
    SuiteFile("functorch/test_ac.py", "partitioner: memory budgets"),
    SuiteFile("inductor/test_control_flow.py", "control flow in Inductor", "not cuda and not xpu"),
    SuiteFile("functorch/test_control_flow.py", "control flow", _COMPILED_SCANS),
    SuiteFile("higher_order_ops/test_invoke_subgraph.py", "nested compile regions"),
    SuiteFile("dynamo/test_activation_checkpointing.py", "checkpointing"),
    SuiteFile("dynamo/test_wrap_inductor_compiled_regions.py", "checkpointing of compiled regions"),
    SuiteFile("inductor/test_unbacked_symints.py", "sizes that depend on data"),
    SuiteFile(
        "inductor/test_torchinductor_dynamic_shapes.py",
        "dynamic shapes in Inductor",
        _DYNAMIC,
    ),
    SuiteFile("inductor/test_mmdecomp.py", "products of many shapes"),
    SuiteFile("inductor/test_auto_functionalize.py", "ops that write to their operands"),
    SuiteFile("inductor/test_compiled_optimizers.py", "compiled optimizers", "adamw or sgd"),
    SuiteFile("inductor/test_distributed_patterns.py", "what FSDP2 does, in one process"),
    # these start processes of their own, in which mst has no other name
    SuiteFile("distributed/_composable/fsdp/test_fully_shard_compile.py", "FSDP2", on_cpu=False),
    SuiteFile(str(OWN), "loss functions, on torch's samples"),
)
