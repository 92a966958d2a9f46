"""Where torch puts what it writes about a compilation: trace, debug folder, compile cache.

Source: torch/_logging/_internal.py, torch/_dynamo/utils.py, torch/_inductor/config.py (``trace``),
torch/_inductor/runtime/cache_dir_utils.py, torch/_functorch/_aot_autograd/logging_utils.py.
"""

from __future__ import annotations

from pathlib import Path

import torch._inductor.config as inductor_config
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging._internal import trace_log, trace_structured_artifact

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = [
    "cache_folder",
    "debug_folder",
    "get_aot_graph_name",
    "is_tracing",
    "trace_structured_artifact",
]

APIS = PrivateApis(
    names=(
        "torch._inductor.config.trace.enabled",
        "torch._inductor.config.trace.debug_dir",
        "torch._dynamo.utils.get_debug_dir",
        "torch._functorch._aot_autograd.logging_utils.get_aot_graph_name",
        "torch._inductor.runtime.cache_dir_utils.cache_dir",
        "torch._logging._internal.trace_structured_artifact(name, encoding, payload_fn)",
        "torch._logging._internal.trace_log.handlers",
    ),
)


def debug_folder() -> Path | None:
    """What ``TORCH_COMPILE_DEBUG=1`` asks Inductor to write to; None where it is not asked."""
    if not inductor_config.trace.enabled:
        return None
    from torch._dynamo.utils import get_debug_dir

    return Path(inductor_config.trace.debug_dir or get_debug_dir()) / "torchinductor"


def cache_folder() -> Path:
    """What Inductor's compile cache lies in."""
    return Path(cache_dir())


def is_tracing() -> bool:
    """Whether ``TORCH_TRACE`` asks for artifacts."""
    return bool(trace_log.handlers)


def probe() -> None:
    APIS.require()
    APIS.expect(bool(get_aot_graph_name()), "get_aot_graph_name gives no name")
    APIS.expect(cache_folder().is_absolute(), "cache_dir gives no folder")
    trace_structured_artifact("mstpass_probe", "string", lambda: "")
