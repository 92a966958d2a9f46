"""Records one eager step: how often each module and each checkpoint ran each op, and when.

Liveness of recomputed ops: which of their results reach an op that computes a gradient.

A result may reach a gradient op directly, or through other recomputed ops. Tensors are followed by
the address of their storage. Every op that allocates is seen, so an address always belongs to the
op that wrote to it last.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_flop

from mstpass.linter.call_stack import OpContext, caller_of, current_context
from mstpass.torch_internals.fake_tensors import TorchDispatchMode, storage_key
from mstpass.torch_internals.graphs import OpOverload, schema_of, tree_leaves
from mstpass.tracing.names import forward_owner, location, module_of, unwrapped
from mstpass.walk import walk_once

aten = torch.ops.aten
# ops that read the shape of their operand but not its values
_SHAPE_ONLY = frozenset(
    {
        aten.empty_like,
        aten.full_like,
        aten.new_empty,
        aten.new_empty_strided,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones_like,
        aten.zeros_like,
    }
)


class RecomputeLiveness:
    """The recomputed ops of one step, numbered as they run, and which of them each one reads."""

    def __init__(self) -> None:
        self._producer: dict[int, int] = {}  # storage address -> op
        self._reads: list[set[int]] = []  # by op: the ops whose results it reads
        self._live: set[int] = set()  # ops that are read by a gradient op, or unseen

    def add_recomputed(self, func: Any, inputs: Any, outputs: Any) -> int | None:
        """Record a recomputed op. Returns its number, or None for an op that only makes views."""
        if only_views(func, inputs, outputs):
            return None
        sources, results = _storages(inputs), _storages(outputs)
        writes = _writes(func)
        number = len(self._reads)
        known = {s for s in sources if s in self._producer}
        self._reads.append(
            set() if _shape_only(func) else {self._producer[address] for address in known}
        )
        overwritten = results & sources if writes else set()
        if not results or overwritten - known:
            # its result is a Python value, or it writes to memory that outlives the recomputation
            self._live.add(number)
        for address in (results - sources) | overwritten:
            self._producer[address] = number
        return number

    def add_other(self, func: Any, inputs: Any, outputs: Any, gradient: bool) -> None:
        """Record an op of the forward or, with ``gradient``, one that computes a gradient.

        What a gradient op reads is live.
        """
        sources = _storages(inputs)
        if gradient and not _shape_only(func):
            self.mark_live(inputs)
        for address in _storages(outputs) - sources:
            self._producer.pop(address, None)

    def mark_live(self, values: Any) -> None:
        """Record that something reads these tensors, seen here or not."""
        self._live |= {self._producer[s] for s in _storages(values) if s in self._producer}

    def live_ops(self) -> list[bool]:
        """After the step: for each op number, whether a gradient depends on the op's result."""
        live = set(walk_once(self._live, self._reads.__getitem__))
        return [number in live for number in range(len(self._reads))]


def only_views(func: Any, inputs: Any, outputs: Any) -> bool:
    """Whether the op only makes views: it writes nothing, and all results alias operands."""
    results = _storages(outputs)
    return bool(results) and not _writes(func) and results <= _storages(inputs)


def _writes(func: Any) -> bool:
    return schema_of(func).is_mutable if isinstance(func, OpOverload) else True


def _shape_only(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) in _SHAPE_ONLY


def _storages(values: Any) -> set[int]:
    tensors = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
    return {address for address in map(_storage, tensors) if address is not None}


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return storage_key(tensor.untyped_storage())
    except (
        NotImplementedError,
        RuntimeError,
    ):  # sparse tensors and some subclasses have no storage
        return None


# ---- the trace -----------------------------------------------------------------------------------
_FLOPS: Mapping[Any, Any] = {
    # missing from torch's table
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    **flop_registry,
}


@dataclass(frozen=True)
class CheckpointCall:
    """A call of ``checkpoint`` in the forward.

    Attributes:
        file, line: where the user's code calls it.
        target: what it checkpoints.
        fsdp: whether it runs inside a module that FSDP wraps.
    """

    file: str
    line: int
    reentrant: bool
    target: Target
    fsdp: bool

    @property
    def location(self) -> str:
        return location(self.file, self.line)


@dataclass(frozen=True)
class Target:
    """What a checkpoint recomputes: a module, or else a function."""

    module: nn.Module | None
    function: Any = field(default=None, compare=False)
    code: types.CodeType | None = None


@dataclass(frozen=True)
class OpKey:
    """Runs with equal keys count together: one op, on one shape, of one module and checkpoint."""

    target: Target | None
    module: nn.Module | None
    op: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class OpRuns:
    """How often the ops of one `OpKey` ran; only ops with flops are recorded.

    Attributes:
        flops: flops of one run.
        forward: runs in the forward.
        recomputed: for each run in the backward, its number in `RecomputeLiveness`; None for views.
        backward_ids: the backwards that recomputed it.
        checkpoints: the calls of ``checkpoint`` around it, the outermost first.
    """

    flops: int = 0
    forward: int = 0
    recomputed: list[int | None] = field(default_factory=list)
    backward_ids: set[int] = field(default_factory=set)
    checkpoints: tuple[CheckpointCall, ...] = ()


@dataclass
class _ForwardCheckpoint:
    """The outermost checkpoint that runs in the forward.

    Its ops count only if it records gradients: otherwise it is never recomputed.
    """

    frame: types.FrameType
    records: bool = False
    ops: Counter[OpKey] = field(default_factory=Counter)


class StepTrace(TorchDispatchMode):
    """Records all ops that run while it is active, in forward and backward.

    Args:
        roots: modules that give their submodules names: the paths from the root.
    """

    def __init__(self, roots: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.runs: dict[OpKey, OpRuns] = {}
        # by id, each module with the attributes of its `ModuleRuns`
        self.modules: dict[int, tuple[nn.Module, Counter[str]]] = {}
        self.roots = {id(root): root for root in roots}
        self.liveness = RecomputeLiveness()
        self.step_flops = 0
        self.ran_backward = False
        self._open: _ForwardCheckpoint | None = None
        # frames of the last op's modules; held, so that no later frame gets the same address
        self._frames: tuple[types.FrameType, ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._record(func, args, kwargs, out)
        return out

    def __exit__(self, *exception: Any) -> None:
        self._frames = ()
        self._close()
        super().__exit__(*exception)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        context = current_context()
        flops = _flops(func, args, kwargs, out)
        self.step_flops += flops
        self.ran_backward = self.ran_backward or context.accumulates
        # a gradient op leaves the frames as they are: autograd.grad may run inside of a forward
        if not (context.gradient or context.upkeep or only_views(func, (args, kwargs), out)):
            self._count_modules(context, flops)
        number = None
        if context.recomputed:
            number = self.liveness.add_recomputed(func, (args, kwargs), out)
            self.liveness.mark_live(context.function_inputs)
        else:
            self.liveness.add_other(func, (args, kwargs), out, context.gradient)
        if context.backward_id is None:
            self._follow_checkpoint(context)
        if flops and not context.gradient:
            self._count_op(_key(context, func, args, kwargs), context, flops, number)

    def _count_modules(self, context: OpContext, flops: int) -> None:
        """Count runs and flops: a module runs anew if the last op did not run in its frame."""
        phase = "forward" if context.backward_id is None else "recompute"
        for module, frame in _module_runs(context):
            _, counts = self.modules.setdefault(id(module), (module, Counter()))
            counts[f"{phase}_runs"] += not any(frame is known for known in self._frames)
            counts[f"{phase}_flops"] += flops
        if context.modules and context.backward_id is None:
            root = context.modules[-1][0]
            self.roots[id(root)] = root
        self._frames = tuple(frame for _, frame in _module_runs(context))

    def _follow_checkpoint(self, context: OpContext) -> None:
        """Note which outermost checkpoint runs, and whether it records gradients."""
        frame = context.checkpoints[-1].frame if context.checkpoints else None
        if self._open is not None and self._open.frame is not frame:
            self._close()
        if self._open is None and frame is not None:
            self._open = _ForwardCheckpoint(frame)
        if self._open is not None:
            self._open.records |= torch.is_grad_enabled() or any(
                run.reentrant and run.recordable for run in context.checkpoints
            )

    def _close(self) -> None:
        if self._open is not None and self._open.records:
            for key, times in self._open.ops.items():
                self.runs[key].forward += times
        self._open = None

    def _count_op(self, key: OpKey, context: OpContext, flops: int, number: int | None) -> None:
        runs = self.runs.setdefault(key, OpRuns())
        runs.flops = flops
        if context.backward_id is not None:
            runs.recomputed.append(number)
            runs.backward_ids.add(context.backward_id)
            runs.checkpoints += _new_calls(runs.checkpoints, context)
        elif self._open is None:
            runs.forward += 1
        else:
            self._open.ops[key] += 1
            runs.checkpoints = max(runs.checkpoints, _checkpoint_calls(context), key=len)


def _module_runs(context: OpContext) -> list[tuple[nn.Module, types.FrameType]]:
    """The modules that run, without wrappers, and those that a checkpoint recomputes."""
    runs = [(module, frame) for module, frame in context.modules if unwrapped(module) is module]
    seen = {id(module) for module, _ in runs}
    for run in reversed(context.checkpoints) if context.backward_id is not None else ():
        module = forward_owner(run.function)
        if module is not None and id(module) not in seen:
            runs.append((module, run.frame))
            seen.add(id(module))
    return runs


def _key(context: OpContext, func: Any, args: Any, kwargs: dict[str, Any]) -> OpKey:
    target = _target(context.checkpoints[0].function) if context.checkpoints else None
    module = context.modules[0][0] if context.modules_inside else None
    leaves = tree_leaves((args, kwargs))
    shapes = tuple(tuple(map(int, v.shape)) for v in leaves if isinstance(v, torch.Tensor))
    return OpKey(target, module, str(func), shapes)


def _target(function: Any) -> Target:
    module = module_of(function)
    if module is not None:
        return Target(module)
    inner = function
    while hasattr(inner, "func"):  # a partial
        inner = inner.func
    return Target(None, function, getattr(inner, "__code__", None))


def _checkpoint_calls(context: OpContext) -> tuple[CheckpointCall, ...]:
    """The calls of ``checkpoint`` around an op, without recomputations, the outermost first."""
    fsdp = any(_is_fsdp(module) for module, _ in context.modules)
    calls = []
    for run in reversed(context.checkpoints):
        if run.reentrant is not None:
            caller, target = caller_of(run.frame), _target(run.function)
            file, line = caller.f_code.co_filename, caller.f_lineno
            calls.append(CheckpointCall(file, line, run.reentrant, target, fsdp))
    return tuple(calls)


def _new_calls(known: tuple[CheckpointCall, ...], context: OpContext) -> tuple[CheckpointCall, ...]:
    """The calls that the recomputation of a single known one makes, and the forward did not.

    A layer of transformers 5.24 is not checkpointed where gradients are off, as they are in the
    forward of a reentrant checkpoint.
    """
    return _checkpoint_calls(context) if len(known) == 1 and known[0].reentrant else ()


def _is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP wraps the module, by class name: importing FSDP needs torch.distributed."""
    names = {cls.__name__ for cls in type(module).__mro__}
    return not names.isdisjoint({"FullyShardedDataParallel", "FSDPModule"})


def _flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    formula = _FLOPS.get(getattr(func, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
