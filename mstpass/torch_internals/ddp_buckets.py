"""Tell which call a graph is that Dynamo's DDPOptimizer has split off, one for each bucket of DDP.

The optimizer splits a graph of Dynamo's into *buckets* and gives each to the backend alone. What a
bucket returns is read by later buckets, or returned by the whole graph. The backend is called from
``SubmodCompiler.run_node``, whose argument ``n`` is the call of the bucket in the whole graph.
Source: torch/_dynamo/backends/distributed.py.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer, SubmodCompiler

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.backends.distributed.SubmodCompiler.run_node(n)",
        "torch._dynamo.backends.distributed.DDPOptimizer.compile_fn(gm)",
    ),
)


def bucket_being_compiled() -> tuple[fx.Node, fx.GraphModule] | None:
    """The call of the bucket for which the backend runs, and Dynamo's graph; None outside of DDP.

    The node is a part of the split graph, not of Dynamo's.
    """
    call = _local(SubmodCompiler.run_node.__code__, "n")
    whole = _local(DDPOptimizer.compile_fn.__code__, "gm")
    if isinstance(call, fx.Node) and isinstance(whole, fx.GraphModule):
        return call, whole
    return None


def _local(code: CodeType, name: str) -> object:
    """A local variable of the innermost running call of a function; None if it does not run."""
    return next((f.f_locals.get(name) for f in _frames() if f.f_code is code), None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def probe() -> None:
    APIS.require()
    APIS.expect(bucket_being_compiled() is None, "a bucket is compiled outside of a compilation")
    source = inspect.getsource(SubmodCompiler.run_node)
    APIS.expect("self.compile_submod(" in source, "run_node does not compile a bucket")
