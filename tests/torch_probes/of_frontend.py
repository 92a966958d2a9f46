"""Checks of Dynamo, modules, checkpoints, DDP, FSDP and ranks; each gets the adapter as ``own``."""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any

import torch
from torch import fx, nn
from torch.utils import checkpoint as torch_checkpoint

from mstpass.torch_internals.versions import expect


# ---- Dynamo ------------------------------------------------------------------------------------
def dynamo(own: Any) -> None:
    """What Dynamo compiles, why a graph of it ends, and how to have it forget a compilation."""
    codes: list[Any] = []
    breaks: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        breaks.append(own.graph_break_after(gm))
        return gm.forward

    hook = own.register_bytecode_hook(lambda code, _: codes.append(code))
    try:
        with torch.compiler.set_stance("default", force_backend=backend):
            torch.compile(_breaks)(torch.ones(2))
    finally:
        hook.remove()
    entries = own._debug_get_cache_entry_list
    expect(_breaks.__code__ in codes, "the bytecode hook is not called")
    ends = [reason is not None for reason in breaks]
    expect(ends == [True, False], "a captured graph does not tell the break after it")
    places = [frame.filename for reason in breaks if reason for frame in reason.user_stack]
    expect(__file__ in places, "GraphCompileReason.user_stack does not tell the place")
    expect(bool(entries(_breaks.__code__)), "no cache entries are listed")
    for code in codes:
        own.forget_backend(code, backend)
    expect(not entries(_breaks.__code__), "reset_code forgets nothing")


def _breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def default_device(own: Any) -> None:
    """A default device, through which Dynamo traces only the calls that make tensors."""
    traced: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        traced.extend(str(node.stack_trace) for node in gm.graph.nodes if node.op != "placeholder")
        traced.extend(str(node.kwargs.get("device")) for node in gm.graph.nodes)
        return gm.forward

    inputs = torch.ones(2, device="meta")
    with own.default_device(torch.device("meta")):
        made = torch.compile(_makes_and_adds, backend=backend, fullgraph=True)(inputs)
    expect(made.device.type == "meta" and "meta" in traced, "a tensor is on another device")
    through_mode = [text for text in traced if "__torch_function__" in text]
    expect(len(through_mode) == 1, "Dynamo traces a default device at other calls")
    expect(torch.zeros(1).device.type == "cpu", "the default device stays")


def _makes_and_adds(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2) + x.sin().mul(2)


def checkpoint_frames(own: Any) -> None:
    """The frames of modules, checkpoints and backward passes on the Python stack."""
    kind = own.FrameKind
    backward = [kind.ENGINE, kind.BACKWARD]
    for reentrant, forward, recomputation in (
        (False, [kind.CHECKPOINT], kind.RECOMPUTATION),
        (True, [kind.REENTRANT_FORWARD, kind.CHECKPOINT], kind.REENTRANT_RECOMPUTATION),
    ):
        module, x = _Sine(), torch.ones(2, requires_grad=True)
        with _Stacks(own) as seen:
            torch_checkpoint.checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        names = [[kind.name for kind in kinds] for kinds in seen.kinds]
        expected = [[kind.MODULE, *forward], [kind.MODULE, recomputation, *backward]]
        expect(seen.kinds == expected, f"checkpointed ops run in the frames {names}")
        functions = all(function is module for function in seen.functions)
        expect(functions, "frames of checkpoints do not tell what is checkpointed")
        known = [number is not None for number in seen.backwards]
        expect(known == [False, True], "torch._C._current_graph_task_id tells no backward")


class _Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()  # of a sine alone nothing would be recomputed but its operand


class _Stacks(torch.utils._python_dispatch.TorchDispatchMode):
    """The kinds of frames that each sine is computed in, innermost first."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, kind = own, own.FrameKind
        self.have_functions = (kind.CHECKPOINT, kind.RECOMPUTATION, kind.REENTRANT_RECOMPUTATION)
        self.kinds: list[list[Any]] = []
        self.functions: list[Any] = []
        self.backwards: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default:
            self.backwards.append(self.own.current_backward())
            frames = [(self.own.kind_of(f), f) for f in self.own.frames_from(sys._getframe())]
            self.kinds.append([kind for kind, _ in frames if kind is not None])
            for kind, frame in frames:
                if kind in self.have_functions:
                    self.functions.append(self.own.checkpointed_function(frame, kind))
        return func(*args, **(kwargs or {}))


# ---- modules -----------------------------------------------------------------------------------
def modules(own: Any) -> None:
    """Modules' own tensors, and what wrappers and torch.compile have put around them."""
    module = nn.BatchNorm1d(2)
    names = [sorted(tensors) for tensors in own.own_tensors(module)]
    expected = [["bias", "weight"], ["num_batches_tracked", "running_mean", "running_var"]]
    expect(names == expected, "a module's _parameters and _buffers hold other tensors")
    for given in (module, _breaks):
        made = torch.compile(given, backend="eager")
        expect(own.uncompiled(made) is given, "torch.compile does not tell what it was given")
    plain = own.is_compiled(module)
    module.compile(backend="eager")
    expect((plain, own.is_compiled(module)) == (False, True), "compiled modules cannot be told")
    own.uncompile_in_place(module)
    expect(not own.is_compiled(module), "nn.Module.compile cannot be undone")
    module.compile(backend="eager")
    if torch.distributed.is_available():
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
        from torch.distributed.fsdp import _common_utils

        wrapped = checkpoint_wrapper.checkpoint_wrapper(module)
        expect(own.wrapped_in(wrapped) is module, "checkpoint_wrapper holds its module elsewhere")
        held = _common_utils.FSDP_WRAPPED_MODULE in own.WRAPPED
        expect(held, "FSDP holds its module elsewhere")


# ---- distributed -------------------------------------------------------------------------------
def collective_ops(own: Any) -> None:
    """The ops of functional collectives, by name; a torch without distributed has none."""
    if not torch.distributed.is_available():
        return
    for name in (own.ALL_REDUCE, own.ALL_TO_ALL_OF_DTENSOR, f"{own.NAMESPACE}::wait_tensor"):
        names = [op._schema.name for op in own.overloads((name,))]
        expect(names == [name], f"there is no op {name}")
    (all_reduce,) = own.overloads((own.ALL_REDUCE,))
    arguments = [argument.name for argument in all_reduce._schema.arguments]
    expect(arguments[:2] == ["input", "reduce_op"], "all_reduce has other arguments")


def pretended_ranks(own: Any) -> None:
    """A process group whose other ranks do not exist, for plans of one rank."""
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        return
    with own.pretended_ranks(2, 1):
        expect(torch.distributed.get_rank() == 1, "this is not the rank that was asked for")
    expect(not torch.distributed.is_initialized(), "the process group is still there")


def attention_blocks(own: Any) -> None:
    """Attention to a block of keys, with the logarithm of its sum of exponentials."""
    query, key = torch.eye(8)[None, None, :2], torch.eye(8)[None, None]
    out, log_sum = own.attend_block(query, key, key, False, 1.0)
    expect(tuple(log_sum.shape) == (1, 1, 2), "the log-sums are not [B, H, s]")
    right = torch.log(torch.tensor(math.e + 7))
    expect(torch.allclose(log_sum, right), "the kernel returns no log-sums")
    expect(torch.allclose(out, (query @ key.mT).softmax(-1)), "the kernel mixes other values")


def agreements(own: Any) -> None:
    """Agree with the other ranks on a number, while graphs are compiled."""
    compiled = own.CompileContext.current_compile_id()
    expect(compiled is None, "a compilation without anything to compile")


def data_parallel(own: Any) -> None:
    """Which data-parallel wrapper runs the graph that is compiled now."""
    graph = fx.Graph()
    graph.output(())
    found = own.wrapper_of(fx.GraphModule(nn.Module(), graph))
    expect(found == own.Wrapper(), "a wrapper around no module")


def ddp_buckets(own: Any) -> None:
    """Which call a graph is that Dynamo has split off for a bucket of DDP."""
    outside = own.bucket_being_compiled()
    expect(outside is None, "a bucket is compiled outside of a compilation")
    source = inspect.getsource(own.SubmodCompiler.run_node)
    expect("self.compile_submod(" in source, "run_node does not compile a bucket")
