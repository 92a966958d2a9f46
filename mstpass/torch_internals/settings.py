"""Patch what torch's modules hold, and restore it: settings, and attributes of any owner.

A patch of settings holds for the thread that makes it: torch keeps settings in context variables.
Up to 2.11 all threads share them; of threads that need the same patch at once, the first makes it
and the last undoes it. Source: torch/_inductor/config.py, torch/_functorch/config.py,
torch/_dynamo/config.py, torch/utils/_config_module.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

_ENTRIES: Any = vars(inductor_config)["_config"]
PER_THREAD = isinstance(_ENTRIES["fx_graph_cache"].user_override, ContextVar)
Patch = Callable[[], AbstractContextManager[Any]]


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """In here, attributes have other values: of each change the owner, the name and the value."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class SharedPatch:
    """A patch of what all threads share, which is there while at least one thread needs it.

    The first thread to enter makes it and the last one to leave undoes it. A patch of one thread's
    own would restore, when it ends, what another thread's patch has put there. A forked process has
    the thread that forked alone, so only that thread's need counts in it.

    Args:
        patch: makes the patch, as a context.
    """

    def __init__(self, patch: Callable[[], AbstractContextManager[Any]]):
        self._patch = patch
        self._lock = threading.Lock()
        self._undo = ExitStack()
        self._threads: list[int] = []  # once for each time that one has entered
        os.register_at_fork(after_in_child=self._forked)

    @property
    def is_made(self) -> bool:
        return bool(self._threads)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._undo.enter_context(self._patch())
            self._threads.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(thread)
                if not self._threads:
                    self._undo.close()

    def _forked(self) -> None:
        self._lock = threading.Lock()  # a thread that is not here may hold the other one
        here = [thread for thread in self._threads if thread == threading.get_ident()]
        if self._threads and not here:
            self._undo.close()
        self._threads = here


# ---- settings ----------------------------------------------------------------------------------
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

    return patch if PER_THREAD else SharedPatch(patch)


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
