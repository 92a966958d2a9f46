"""Collectives in graphs, data-parallel wrappers around them, and agreements between ranks.

Source: torch/csrc/distributed/c10d/Functional.cpp, torch/_dynamo/backends/distributed.py,
torch/_dynamo/convert_frame.py, torch/_dynamo/distributed.py, torch/_dynamo/output_graph.py
(``run_compiler_collective``), torch/_guards.py (``CompileId``), torch/nn/parallel/distributed.py,
torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.distributed import DDPOptimizer, SubmodCompiler
from torch._dynamo.distributed import get_compile_pg
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch

from mstpass.torch_internals.dynamo import frames_from
from mstpass.torch_internals.graphs import OpOverload

# The ops of functional collectives, by name, which DTensor and torch.distributed put into a graph:
# torch has no public names for them, and a torch without distributed has none of them. A collective
# returns a pending result, and ``wait_tensor`` the same memory, complete.
NAMESPACE = "_c10d_functional"
ALL_REDUCE = f"{NAMESPACE}::all_reduce"
ALL_TO_ALL_OF_DTENSOR = "_dtensor::shard_dim_alltoall"  # its result is complete
WAITS = frozenset({f"{NAMESPACE}::wait_tensor", f"{NAMESPACE}::wait_tensors"})
BETWEEN_TWO = frozenset({f"{NAMESPACE}::{op}" for op in ("isend", "irecv", "batch_p2p_ops")})


def overloads(names: tuple[str, ...]) -> list[OpOverload]:
    """The ops of these names, such as ``_c10d_functional::all_reduce``, that this torch has."""
    found = []
    for name in names:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            found.append(packet.default)
    return found


def group_size(name: str) -> int:
    """The number of ranks of a process group; 0 if this process has no group of this name."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    try:
        c10d: Any = dist.distributed_c10d
        return int(c10d._resolve_process_group(name).size())
    except (RuntimeError, ValueError):  # a graph of another process
        return 0


# ---- data-parallel wrappers ----------------------------------------------------------------------
DDP, FSDP2 = "DDP", "FSDP2"


@dataclasses.dataclass(frozen=True)
class Split:
    """How DDP's buckets have split a graph, seen from one part of it.

    Attributes:
        bucket_bytes: DDP's ``bucket_cap_mb``.
        part: the number of this part, from 1 in the order of the forward.
        parts: the number of parts.
        entering: the (fake) tensors that come from earlier parts.
    """

    bucket_bytes: int
    part: int
    parts: int
    entering: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """The wrapper around a graph: ``DDP`` or ``FSDP2``, or an empty name without one."""

    name: str = ""
    split: Split | None = None


def wrapper_of(gm: fx.GraphModule) -> Wrapper:
    """The wrapper around a graph that Dynamo is compiling.

    DDP's forward and FSDP2's hooks are not compiled: each ends a graph. Besides, Dynamo splits the
    graph of a module inside DDP where one bucket of gradients is full, so that DDP can reduce the
    bucket's gradients while the backward of the earlier layers runs. Each part is compiled by
    itself. A part's inputs are parameters and inputs of the whole graph, which have a Dynamo
    source, and values of earlier parts, which have none.
    """
    if not torch.distributed.is_available():
        return Wrapper()
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        return Wrapper(DDP, _split(gm, ddp.bucket_bytes_cap))
    return Wrapper(FSDP2) if _is_sharded(gm) else Wrapper()


def _split(gm: fx.GraphModule, bucket_bytes: int) -> Split | None:
    """The split that the graph is a part of."""
    bucket = bucket_being_compiled()
    if bucket is None:
        return None
    call, _ = bucket
    calls = list(call.graph.find_nodes(op="call_module"))
    return Split(bucket_bytes, calls.index(call) + 1, len(calls), tuple(_entering(gm)))


def _entering(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """The tensors that earlier parts made."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if getattr(node, "_dynamo_source", None) is None and isinstance(value, torch.Tensor):
            yield value


def _is_sharded(gm: fx.GraphModule) -> bool:
    """Whether a node is from a module that FSDP2 wraps."""
    from torch.distributed.fsdp import FSDPModule

    stacks = (node.meta.get("nn_module_stack") or {} for node in gm.graph.nodes)
    classes = {entry[1] for stack in stacks for entry in stack.values()}
    return any(isinstance(cls, type) and issubclass(cls, FSDPModule) for cls in classes)


def bucket_being_compiled() -> tuple[fx.Node, fx.GraphModule] | None:
    """The call of the bucket for which the backend runs, and Dynamo's graph; None outside of DDP.

    Dynamo's DDPOptimizer splits a graph into *buckets* and gives each to the backend alone. What a
    bucket returns is read by later buckets, or returned by the whole graph. The backend is called
    from ``SubmodCompiler.run_node``, whose argument ``n`` is the call of the bucket. That node is a
    part of the split graph, not of Dynamo's.
    """
    call = _local(SubmodCompiler.run_node.__code__, "n")
    whole = _local(DDPOptimizer.compile_fn.__code__, "gm")
    if isinstance(call, fx.Node) and isinstance(whole, fx.GraphModule):
        return call, whole
    return None


def _local(code: CodeType, name: str) -> object:
    """A local variable of the innermost running call of a function; None if it does not run."""
    return next(
        (f.f_locals.get(name) for f in frames_from(sys._getframe()) if f.f_code is code), None
    )


# ---- agreements between ranks --------------------------------------------------------------------
PATIENCE_S = 120.0
_POLL_S = 0.02
_ALONE = "mstpass/alone"


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The answer to a question to all ranks.

    Attributes:
        number: the least of the numbers that all ranks asked with; of this rank if ``alone``.
        alone: why this rank does without the others although it asked them; else empty.
    """

    number: int
    alone: str = ""


class _Questions:
    """What this process has asked the other ranks of a process group, through the group's store."""

    _asked = 0  # counted over all groups, because a new group may have the store of an old one

    def __init__(self, group: Any):
        self.alone = ""
        self.agreed: dict[int | None, int] = {}  # by the number of the frame
        self._store: Any = dist.distributed_c10d._get_default_store()

    def least(self, number: int) -> Agreed:
        """The least of all ranks' numbers."""
        rank, topic = dist.get_rank(), f"mstpass/{_Questions._asked}"
        _Questions._asked += 1
        try:
            self._store.set(f"{topic}/{rank}", str(number))
            for other in range(dist.get_world_size()):
                if not self._comes(f"{topic}/{other}", other):
                    self._store.set(f"{_ALONE}/{rank}", "")
                    self.alone = f"rank {other} did not compile together with rank {rank}"
                    return Agreed(number, self.alone)
                number = min(number, int(self._store.get(f"{topic}/{other}")))
        except RuntimeError as error:  # the store is gone, or lost its connection
            self.alone = f"rank {rank} could not ask the other ranks ({error})"
        return Agreed(number, self.alone)

    def _comes(self, key: str, rank: int) -> bool:
        """Wait for another rank's number; False if it does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._store.check([key]):
            if self._store.check([f"{_ALONE}/{rank}"]) or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


@functools.lru_cache(maxsize=1)  # a new group starts anew
def _questions_to(group: Any) -> _Questions:
    return _Questions(group)


def least_of_ranks(number: int) -> Agreed:
    """The least of the numbers that all ranks call this with, where they can be asked.

    A rank that compiles alone must not wait for the others for ever. There are two ways to ask:

    - ``torch._dynamo.config.enable_compiler_collectives`` (``TORCH_COMPILER_COLLECTIVES=1``) is the
      user's promise that all ranks compile at the same time, under which Dynamo itself talks to the
      other ranks for each graph. Then a collective asks them.
    - Otherwise the store of the process group does. Each rank writes down its number for the
      *first* compilation of each frame, and waits for those of the others. Ranks that run the same
      program reach the same frame for the first time in the same step, whatever the length of their
      batches. They may compile a frame *again* at different times: then nobody is asked, and the
      number is at most what the ranks agreed on when they compiled the frame first.

    A rank whose number does not come within ``PATIENCE_S`` runs another program. From then on this
    one asks nobody any more, and writes that down too, so that nobody waits for it.
    """
    group = get_compile_pg()
    if group is not None:
        numbers = [number] * group.size()
        with no_dispatch(), unset_fake_temporarily():
            dist.all_gather_object(numbers, number, group=group)
        return Agreed(min(numbers))
    frame = CompileContext.current_compile_id()
    if frame is None or not has_ranks() or not has_store():
        return Agreed(number)
    questions = _questions_to(dist.group.WORLD)
    if questions.alone:
        return Agreed(number, questions.alone)
    if frame.frame_compile_id != 0:  # again, and perhaps no other rank does so now
        return Agreed(min(number, questions.agreed.get(frame.frame_id, number)))
    agreed = questions.least(number)
    questions.agreed[frame.frame_id] = agreed.number
    return agreed


# ---- whether ranks compile alike -----------------------------------------------------------------
_YES = "alike"


@functools.lru_cache(maxsize=1)  # a new group starts anew
def _asked(group: Any) -> Counter[str]:
    """How often each topic came up in this process, by topic."""
    return Counter()


class Alike:
    """A question to the ranks of some process groups: do all of you have the same answer?

    Each rank writes down its own answer, in the store of the process group. One that has to know
    waits for those of the others, which may compile later, or not this graph at all. The first one
    that knows, or has waited for long enough, writes down a verdict: it counts for all.

    Args:
        groups: names of process groups. Of several ones, all ranks are asked.
        topic: what the question is about, the same text on all ranks.
    """

    def __init__(self, groups: Sequence[str], topic: str):
        c10d: Any = dist.distributed_c10d
        self._store = c10d._get_default_store()
        group: Any = dist.group.WORLD
        if len(set(groups)) == 1:
            group = c10d._resolve_process_group(groups[0])
        self._ranks = dist.get_process_group_ranks(group)
        among = hashlib.sha256(f"{self._ranks} {topic}".encode()).hexdigest()
        number = _asked(dist.group.WORLD)[among]
        _asked(dist.group.WORLD)[among] += 1
        self._key = f"mstpass/alike/{among}/{number}"

    def tell(self, answer: str) -> None:
        """Write down the answer of this rank, for those that wait for it."""
        self._store.set(f"{self._key}/{dist.get_rank()}", answer)

    def why_not(self, answer: str) -> str:
        """Why not all ranks are known to have this answer; empty if they have."""
        verdict = self._store.compare_set(f"{self._key}/verdict", "", self._found(answer))
        return str(verdict.decode()).removeprefix(_YES)

    def _found(self, answer: str) -> str:
        """The verdict by what this rank sees."""
        deadline = time.monotonic() + PATIENCE_S
        for rank in self._ranks:
            key = f"{self._key}/{rank}"
            while not self._store.check([key]):
                if self._store.check([f"{self._key}/verdict"]):
                    return _YES  # of another rank, which counts
                if time.monotonic() > deadline:
                    return f"rank {rank} did not compile together with rank {dist.get_rank()}"
                time.sleep(_POLL_S)
            if self._store.get(key).decode() != answer:
                return f"rank {rank} has another plan than rank {dist.get_rank()}"
        return _YES


def has_ranks() -> bool:
    """Whether this process is one of several that train together."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1 and dist.get_backend() != "fake"  # its ranks do not exist


def has_store() -> bool:
    """Whether the ranks have a store in which they can leave each other messages."""
    return dist.get_backend() != "mpi"
