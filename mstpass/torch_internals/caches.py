"""What torch counts and writes while it compiles: cache hits, traces, debug folder, compile cache.

Source: torch/_dynamo/utils.py (``counters``), torch/_inductor/metrics.py, utils.py, codecache.py,
config.py (``trace``), runtime/cache_dir_utils.py; torch/_logging/_internal.py;
torch/_functorch/_aot_autograd/autograd_cache.py and logging_utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._inductor import metrics
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch._logging._internal import trace_log, trace_structured_artifact

__all__ = ["counters", "fresh_cache", "get_aot_graph_name", "trace_structured_artifact"]


class CacheCounts(NamedTuple):
    """How many graphs came from the compile caches, and how many Inductor compiled afresh."""

    hits: int
    fresh: int

    def since(self, before: CacheCounts) -> CacheCounts:
        return CacheCounts(self.hits - before.hits, self.fresh - before.fresh)


def cache_counts() -> CacheCounts:
    """The counts of this process. With Inductor's cache turned off, neither is counted."""
    of_graphs, of_steps = counters["inductor"], counters["aot_autograd"]
    return CacheCounts(
        hits=of_steps["autograd_cache_hit"] + of_graphs["fxgraph_cache_hit"],
        fresh=of_graphs["fxgraph_cache_miss"] + of_graphs["fxgraph_cache_bypass"],
    )


def num_auto_chunked() -> int:
    """How many graphs Inductor's auto_chunker has changed in this process."""
    return metrics.num_auto_chunking


def debug_folder() -> Path | None:
    """What ``TORCH_COMPILE_DEBUG=1`` asks Inductor to write to; None where it is not asked."""
    if not inductor_config.trace.enabled:
        return None
    from torch._dynamo.utils import get_debug_dir

    return Path(inductor_config.trace.debug_dir or get_debug_dir()) / "torchinductor"


def is_tracing() -> bool:
    """Whether ``TORCH_TRACE`` asks for artifacts."""
    return bool(trace_log.handlers)


def cache_folder() -> Path:
    """What Inductor's compile cache lies in."""
    return Path(cache_dir())
