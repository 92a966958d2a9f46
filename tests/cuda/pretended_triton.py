"""Compile a step for a pretended GPU: to the code that Inductor writes, and to cubins.

Triton compiles for an architecture without a driver, if it is told the architecture. What needs a
driver is left out: the launchers of kernels, and measuring which configuration of a kernel is the
fastest. Used inside of ``pretended_gpu``. Source: torch/_inductor/runtime/triton_heuristics.py,
torch/_inductor/graph.py (2.15).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering

from mstpass.torch_internals.settings import is_inductor_setting, replaced

_SETTINGS = {
    "fx_graph_cache": False,
    "use_static_triton_launcher | use_static_cuda_launcher": False,
}
_WARP_THREADS = 32
# Functions that a build without CUDA lacks, and what Inductor is told.
_OF_CUDA_BUILDS = {"_cuda_getCurrentRawStream": 0, "_cuda_cudaCachingAllocator_is_enabled": True}


@dataclasses.dataclass
class GeneratedCode:
    """What was compiled in ``generated_code``.

    Attributes:
        modules: the Python source of each graph, in the order in which they were compiled: the
            backward first.
        binaries: of each Triton kernel, its number of configurations that compiled to a cubin.
        failures: of each kernel that did not compile, the error.
    """

    modules: list[str] = dataclasses.field(default_factory=list)
    binaries: dict[str, int] = dataclasses.field(default_factory=dict)
    failures: dict[str, Exception] = dataclasses.field(default_factory=dict)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@contextmanager
def generated_code(
    capability: tuple[int, int], compile_kernels: bool = False
) -> Iterator[GeneratedCode]:
    """Collects the code of all graphs that are compiled in here.

    Args:
        compile_kernels: also compile Triton's kernels to cubins, which takes about a second each.
    """
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    found = GeneratedCode()

    def precompile(kernel: Any, *_: Any, **__: Any) -> None:
        if not compile_kernels:
            return
        name = f"{kernel.inductor_meta.get('kernel_name', kernel.fn)} {len(found.binaries)}"
        try:
            kernel._precompile_worker()
            compiled = [result.kernel for result in kernel.compile_results]
            found.binaries[name] = sum("cubin" in binary.asm for binary in compiled)
        except Exception as error:
            found.failures[name] = error

    settings = {
        next(filter(is_inductor_setting, names.split(" | "))): value
        for names, value in _SETTINGS.items()
    }
    with ExitStack() as stack:
        changes = (
            (GraphLowering, "save_output_code", staticmethod(found.modules.append)),
            (triton.runtime.driver, "_active", _Driver(capability)),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (triton_heuristics.CachingAutotuner, "precompile", precompile),
            (AlgorithmSelectorCache, "make_benchmark_fn", _unmeasured),
        )
        stack.enter_context(replaced(*changes))
        for name, answer in _OF_CUDA_BUILDS.items():
            if not hasattr(torch._C, name):
                told = mock.patch.object(torch._C, name, create=True, return_value=answer)
                stack.enter_context(told)
        stack.enter_context(inductor_config.patch(settings))
        yield found


def _unmeasured(*_: Any, **__: Any) -> Any:
    """In place of what measures ways to compute a product: the first Triton template is best."""
    from torch._inductor.select_algorithm import TritonTemplateCaller

    return lambda choices: {c: 1.0 + (not isinstance(c, TritonTemplateCaller)) for c in choices}


class _Driver:
    """Triton's driver, which knows only the architecture it compiles for."""

    def __init__(self, capability: tuple[int, int]):
        from triton.backends.compiler import GPUTarget

        major, minor = capability
        self.target = GPUTarget("cuda", 10 * major + minor, _WARP_THREADS)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0
