"""Compile a step for a GPU that is not there: mstpass, Inductor and Triton, up to the launch."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor.fx_passes import pad_mm

import mstpass
from mstpass import backend, gpus
from mstpass.graph.loop_op import SUM, mst_loop
from mstpass.torch_internals.pretended_gpu import pretended_gpu
from mstpass.tracing.fake_tensors import FakeTensors
from mstpass.tracing.joint_graphs import cause_of
from tests.cuda.generated_code import LoopCode, loops_of
from tests.cuda.pretended_triton import GeneratedCode, generated_code

CUDA = torch.device("cuda", 0)
_Buffer = tuple[tuple[int, ...], str]  # shape and dtype
_DEFAULTS = {"strict": True, "memory_budget": "free"}


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A compiled step.

    Attributes:
        primals: the given tensors, in the order in which forward takes them.
        results: the names of what forward returns, of which the last ones are saved.
        saved: the names of what backward takes: saved values and tangents.
        accumulators: shape and dtype of the large sums of all loops; those with a symbolic size are
            left out.
        seconds: the time that compiling took.
    """

    report: mstpass.Report
    code: GeneratedCode
    primals: tuple[Any, ...]
    results: tuple[str, ...]
    saved: tuple[str, ...]
    accumulators: frozenset[_Buffer]
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(self.code.modules)

    @property
    def loops(self) -> list[LoopCode]:
        """The bodies of all loops; equal ones share their code."""
        return [loop for code in self.code.modules for loop in loops_of(code)]


def dry_run(
    step: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    gpu: str = "h100",
    kernels: bool = False,
    dynamic_dim: int | None = None,
    dynamic: bool | None = None,
    mode: str | None = None,
    padding_pays: bool = False,
    **options: Any,
) -> DryRun:
    """Compile ``step(*inputs)``, all of whose tensors stand for tensors of the GPU.

    Args:
        kernels: compile Triton's kernels to cubins.
        dynamic_dim: the dim of the inputs that is marked dynamic.
        dynamic, mode: of ``torch.compile``.
        padding_pays: what Inductor finds where it measures padded products.
        options: of mstpass.
    """
    done: list[DryRun] = []
    fakes = FakeTensors(also_real=True, device=CUDA)

    def compile_only(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        start = time.perf_counter()
        given = {**_DEFAULTS, **options}
        # As in a user's call, where mst asks for what Dynamo has traced real tensors with: sizes
        # that vary are symbols, and the graph has a plan for each range of them.
        traced = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        with _split_graphs() as graphs:
            backend.mst(gm, traced, options=given, mode=mode)
        originals = {id(fake): value for value, fake in fakes._known.values()}
        primals = tuple(
            x.node.hint if isinstance(x, torch.SymInt) else originals.get(id(x), x)
            for x in example_inputs
        )
        report, seconds = mstpass.reports()[-1], time.perf_counter() - start
        done.append(DryRun(report, code, primals, *graphs[-1], seconds))
        raise _Done

    kind = gpus.gpu(gpu)
    torch._dynamo.reset()
    with (
        pretended_gpu(kind),
        generated_code(kind.capability, kernels) as code,
        mock.patch.object(pad_mm, "_should_pad", return_value=padding_pays),
        fakes.replacing((step, tuple(inputs))) as (fn, given),
    ):
        for tensor in given if dynamic_dim is not None else ():
            torch._dynamo.mark_dynamic(tensor, dynamic_dim)
        try:
            torch.compile(fn, backend=compile_only, dynamic=dynamic, fullgraph=True)(*given)
        except Exception as error:
            if not isinstance(cause_of(error), _Done):
                raise
    torch._dynamo.reset()
    return done[0]


class _Done(Exception):
    """The step is compiled: it would run now."""


_Graphs = tuple[tuple[str, ...], tuple[str, ...], frozenset[_Buffer]]


@contextlib.contextmanager
def _split_graphs() -> Iterator[list[_Graphs]]:
    """Collects results, saved values and accumulators of the graphs that the partitioner makes."""
    found: list[_Graphs] = []
    call = backend.Partitioner.__call__

    def partition(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward, backward = call(self, *args, **kwargs)
        results: Any = forward.graph.output_node().args[0]
        names = tuple(n.name if isinstance(n, fx.Node) else "" for n in results)
        saved = tuple(n.name for n in backward.graph.find_nodes(op="placeholder"))
        found.append((names, saved, _accumulators(forward) | _accumulators(backward)))
        return forward, backward

    with mock.patch.object(backend.Partitioner, "__call__", partition):
        yield found


def _accumulators(module: fx.GraphModule) -> frozenset[_Buffer]:
    calls = module.graph.find_nodes(op="call_function", target=mst_loop)
    specs: list[Any] = [spec for call in calls for spec in call.args[4]]
    sums = [(tuple(shape), str(dtype)) for kind, shape, dtype in specs if kind == SUM]
    return frozenset(
        (shape, dtype)
        for shape, dtype in sums
        if len(shape) > 1 and all(isinstance(size, int) for size in shape)
    )


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
