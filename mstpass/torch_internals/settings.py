"""Read and patch the settings of Inductor, AOTAutograd and Dynamo.

A patch holds for the thread that makes it: torch keeps settings in context variables. Up to 2.11
all threads share them; of threads that need the same patch at once, the first makes it and the last
undoes it. Source: torch/_inductor/config.py, torch/_functorch/config.py, torch/_dynamo/config.py,
torch/utils/_config_module.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from mstpass.torch_internals.patches import SharedPatch
from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._inductor.config._config",
        "torch._inductor.config.patch",
        "torch._inductor.config.get_config_copy",
        "torch._inductor.config.fx_graph_cache",
        "torch._inductor.config.post_grad_custom_pre_pass",
        "torch._inductor.config.shape_padding",
        "torch._inductor.config.force_shape_pad",
        "torch._inductor.config.compile_threads",
        "torch._functorch.config.patch",
        "torch._functorch.config.activation_memory_budget",
        "torch._functorch.config.cse",
        "torch._functorch.config.enable_autograd_cache",
        "torch._functorch.config.force_non_lazy_backward_lowering",
        "torch._dynamo.config.patch",
        "torch._dynamo.config.automatic_dynamic_shapes",
        "torch._dynamo.config.error_on_recompile",
        "torch._dynamo.config.run_gc_after_compile",
    ),
)
_ENTRIES: Any = vars(inductor_config)["_config"]
_PER_THREAD = isinstance(_ENTRIES["fx_graph_cache"].user_override, ContextVar)

Patch = Callable[[], AbstractContextManager[Any]]


def inductor_setting(name: str) -> Any:
    """The value in force; None if there is no such setting."""
    return getattr(inductor_config, name, None)


def inductor_settings() -> Set[str]:
    """The names of all settings, without those that are aliases of others."""
    return inductor_config.get_config_copy().keys()


def is_inductor_setting(name: str) -> bool:
    return hasattr(inductor_config, name)


def merges_equal_nodes() -> bool:
    """Whether torch's partitioner eliminates common subexpressions."""
    return bool(functorch_config.cse)


def _patch(config: Any, **values: Any) -> Patch:
    def patch() -> AbstractContextManager[Any]:
        return config.patch(**values)

    return patch if _PER_THREAD else SharedPatch(patch)


def without_padding() -> dict[str, Any]:
    """The setting that leaves matrix products as they are, unless the user asked for padding.

    On CUDA, Inductor pads the factors of products whose sizes are no multiples of 8, if that is
    faster. It does so in the joint graph, where the padded values would end a region; it allocates
    and runs the products to measure them; and its choice may differ between ranks. Loops need no
    padding: Inductor aligns the rows of the logits that it allocates itself.
    """
    asked = inductor_config.force_shape_pad or os.environ.get("TORCHINDUCTOR_SHAPE_PADDING") == "1"
    return {} if asked else {"shape_padding": False}


# Forward and backward are compiled together: a backward that fails can be undone with its forward.
backward_compiled_at_once = _patch(functorch_config, force_non_lazy_backward_lowering=True)
# A size that has had two values stays a number.
static_sizes = _patch(dynamo_config, automatic_dynamic_shapes=False)
# Workers would be started where torch sees a GPU.
compiled_in_one_process = _patch(inductor_config, compile_threads=1)
# Dynamo collects garbage after each compilation: a second for a graph of 32 layers.
no_collection_after_tracing = _patch(dynamo_config, run_gc_after_compile=False)
recompilation_fails = _patch(dynamo_config, error_on_recompile=True)


def torch_budget(fraction: float) -> AbstractContextManager[Any]:
    """``activation_memory_budget``, which torch's own partitioner plans under."""
    return functorch_config.patch(activation_memory_budget=fraction)


@contextmanager
def inductor_graphs_given_to(graph_pass: Callable[[Any], None]) -> Iterator[None]:
    """Have a pass see all graphs that Inductor gets; none comes from a cache."""
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False, post_grad_custom_pre_pass=graph_pass),
    ):
        yield


def probe() -> None:
    APIS.require()
    seen: list[bool] = []

    def look() -> None:
        seen.append(functorch_config.force_non_lazy_backward_lowering)

    look()
    with backward_compiled_at_once():
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    before, within, elsewhere, after = seen
    APIS.expect(within, "torch._functorch.config.patch changes nothing")
    APIS.expect(after == before, "torch._functorch.config.patch does not restore")
    APIS.expect(elsewhere == (before if _PER_THREAD else True), "settings are shared otherwise")
