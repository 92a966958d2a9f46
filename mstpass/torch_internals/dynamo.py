"""What Dynamo compiles, why a graph of it ends, and how to have it forget a compilation.

``explain`` traces functions and leaves Dynamo as it was: of the code objects that Dynamo compiled
meanwhile, which the bytecode hook tells, it resets those that hold nothing else. Source:
torch/_dynamo/convert_frame.py, output_graph.py, exc.py; torch/csrc/dynamo/eval_frame.c.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException, Unsupported
from torch._dynamo.output_graph import GraphCompileReason

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = [
    "TRACING_LOGGERS",
    "GraphCompileReason",
    "RestartAnalysis",
    "TorchDynamoException",
    "Unsupported",
    "forget_backend",
    "graph_break_after",
    "maybe_mark_dynamic",
    "register_bytecode_hook",
]

APIS = PrivateApis(
    names=(
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._dynamo.convert_frame.register_bytecode_hook(hook)",
        "torch._dynamo.exc.RestartAnalysis",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.exc.Unsupported",
        "torch._dynamo.maybe_mark_dynamic",
        "torch._dynamo.output_graph.GraphCompileReason(reason, user_stack, graph_break)",
        "torch._subclasses.fake_tensor.log",
        "torch._dynamo.variables.tensor.log",
        "torch._dynamo.variables.ctx_manager.log",
    ),
)

# They repeat what an error says, or warn of what only matters in a real run.
TRACING_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch._dynamo.variables.tensor",
    "torch._dynamo.variables.ctx_manager",
)


def graph_break_after(gm: fx.GraphModule) -> GraphCompileReason | None:
    """Why a graph that Dynamo captured ends before its function does; None where it does not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason if isinstance(reason, GraphCompileReason) and reason.graph_break else None


def forget_backend(code: types.CodeType, backend: Callable[..., Any]) -> None:
    """Drop what Dynamo keeps of a code object, unless another backend compiled it as well."""
    if all(entry.backend is backend for entry in _debug_get_cache_entry_list(code)):
        reset_code(code)


def _breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def probe() -> None:
    APIS.require()
    codes: list[types.CodeType] = []
    breaks: list[GraphCompileReason | None] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        breaks.append(graph_break_after(gm))
        return gm.forward

    hook = register_bytecode_hook(lambda code, _: codes.append(code))
    try:
        with torch.compiler.set_stance("default", force_backend=backend):
            torch.compile(_breaks)(torch.ones(2))
    finally:
        hook.remove()
    APIS.expect(_breaks.__code__ in codes, "the bytecode hook is not called")
    ends = [reason is not None for reason in breaks]
    APIS.expect(ends == [True, False], "a captured graph does not tell the break after it")
    places = [frame.filename for reason in breaks if reason for frame in reason.user_stack]
    APIS.expect(__file__ in places, "GraphCompileReason.user_stack does not tell the place")
    APIS.expect(bool(_debug_get_cache_entry_list(_breaks.__code__)), "no cache entries are listed")
    for code in codes:
        forget_backend(code, backend)
    APIS.expect(not _debug_get_cache_entry_list(_breaks.__code__), "reset_code forgets nothing")
