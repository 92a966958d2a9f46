"""Collectives in graphs, data-parallel wrappers around them, and agreements between ranks.

Functional collectives are pure functions, so that a graph holds them as ops; those of
``torch.distributed`` write into a buffer of the caller. A group is given by its name, which a graph
holds as a constant.

Source: torch/distributed/_functional_collectives.py, torch/csrc/distributed/c10d/Functional.cpp,
torch/_dynamo/backends/distributed.py, torch/_dynamo/convert_frame.py, torch/_dynamo/distributed.py,
torch/_dynamo/output_graph.py (``run_compiler_collective``), torch/_guards.py (``CompileId``),
torch/nn/parallel/distributed.py, torch/distributed/distributed_c10d.py.
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
from torch import Tensor, fx
from torch._dynamo.backends.distributed import DDPOptimizer, SubmodCompiler
from torch._guards import CompileContext
from torch.distributed.device_mesh import DeviceMesh

from mstpass.torch_internals.dynamo import frames_from
from mstpass.torch_internals.graphs import OpOverload

if dist.is_available():
    from torch.distributed._functional_collectives import all_to_all_single_autograd

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
_times: Counter[str] = Counter()  # that a topic came up: a new group may have an old one's store


def _answer(store: Any, topic: str, rank: int, given_up: str) -> str | None:
    """What a rank has written down on a topic, once it has; None if it does not come.

    Args:
        given_up: the key under which a rank says that nobody need wait.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not store.check([f"{topic}/{rank}"]):
        if store.check([given_up]) or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return str(store.get(f"{topic}/{rank}").decode())


def _store() -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._get_default_store()


def _did_not_compile(other: int) -> str:
    return f"rank {other} did not compile together with rank {dist.get_rank()}"


class _Questions:
    """What this process has asked the other ranks of a process group, through the group's store."""

    def __init__(self) -> None:
        self.alone = ""  # why this rank does without the others although it asked them
        self.agreed: dict[int | None, int] = {}  # by the number of the frame

    def least(self, number: int) -> int:
        """The least of all ranks' numbers; of this one's if they cannot be asked."""
        rank, topic, store = dist.get_rank(), f"mstpass/{_times['']}", _store()
        _times[""] += 1
        try:
            store.set(f"{topic}/{rank}", str(number))
            for other in range(dist.get_world_size()):
                answer = _answer(store, topic, other, f"{_ALONE}/{other}")
                if answer is None:
                    store.set(f"{_ALONE}/{rank}", "")
                    self.alone = _did_not_compile(other)
                    break
                number = min(number, int(answer))
        except RuntimeError as error:  # the store is gone, or lost its connection
            self.alone = f"rank {rank} could not ask the other ranks ({error})"
        return number


@functools.lru_cache(maxsize=1)  # a new group starts anew
def _questions_to(group: Any) -> _Questions:
    return _Questions()


def least_of_ranks(number: int) -> tuple[int, str]:
    """The least of the numbers that all ranks call this with, where they can be asked.

    A rank that compiles alone must not wait for the others for ever. Each rank writes down its
    number for the *first* compilation of each frame, in the store of the process group, and waits
    for those of the others. Ranks that run the same program reach the same frame for the first time
    in the same step, whatever the length of their batches. They may compile a frame *again* at
    different times: then nobody is asked, and the number is at most what the ranks agreed on when
    they compiled the frame first.

    A rank whose number does not come within ``PATIENCE_S`` runs another program. From then on this
    one asks nobody any more, and writes that down too, so that nobody waits for it.

    Returns:
        The number, and why it is that of this rank although it asked the others; else empty.
    """
    frame = CompileContext.current_compile_id()
    if frame is None or not has_ranks() or not has_store():
        return number, ""
    questions = _questions_to(dist.group.WORLD)
    if not questions.alone and frame.frame_compile_id == 0:
        questions.agreed[frame.frame_id] = questions.least(number)
    if questions.alone:
        return number, questions.alone
    return min(number, questions.agreed.get(frame.frame_id, number)), ""


# ---- whether ranks compile alike -----------------------------------------------------------------
_YES = "alike"


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
        group: Any = dist.group.WORLD
        if len(set(groups)) == 1:
            group = c10d._resolve_process_group(groups[0])
        self._store, self._ranks = _store(), dist.get_process_group_ranks(group)
        among = hashlib.sha256(f"{self._ranks} {topic}".encode()).hexdigest()
        self._topic = f"mstpass/alike/{among}/{_times[among]}"
        _times[among] += 1

    def tell(self, answer: str) -> None:
        """Write down the answer of this rank, for those that wait for it."""
        self._store.set(f"{self._topic}/{dist.get_rank()}", answer)

    def why_not(self, answer: str) -> str:
        """Why not all ranks are known to have this answer; empty if they have."""
        verdict = self._store.compare_set(f"{self._topic}/verdict", "", self._found(answer))
        return str(verdict.decode()).removeprefix(_YES)

    def _found(self, answer: str) -> str:
        """The verdict by what this rank sees, which counts if no other rank's is there."""
        for rank in self._ranks:
            theirs = _answer(self._store, self._topic, rank, f"{self._topic}/verdict")
            if theirs is None:
                return _did_not_compile(rank)
            if theirs != answer:
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


# ---- exchanges that torch.compile traces ---------------------------------------------------------
def all_to_all(x: Tensor, group_name: str) -> Tensor:
    """Send each equal part of the first dim to one rank of the group, in order, and get as many.

    Autograd sends the gradient the same way back.
    """
    return all_to_all_single_autograd(x.contiguous(), None, None, group_name)  # type: ignore[arg-type]


def begin_all_to_all(x: Tensor, size: int, group_name: str) -> Tensor:
    """The same without autograd; the result is complete once `wait` has returned it."""
    parts = [x.shape[0] // size] * size
    return _begin(x, parts, parts, group_name)


def _begin(x: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    exchange = torch.ops._c10d_functional.all_to_all_single
    pending: Tensor = exchange(x.contiguous(), received, sent, group_name)
    return pending


def wait(pending: Tensor) -> Tensor:
    """What was begun, complete."""
    complete: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return complete


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of a mesh of several dims in one group, those of the last dim side by side."""
    return mesh._flatten().get_group()


def pass_on(x: Tensor, rank: int, size: int, group_name: str) -> Tensor:
    """Send ``x`` to the next of a group's ranks, and get as much from the one before. No autograd.

    Args:
        rank: which of the ``size`` ranks of the group this is.
    """
    rows = x.shape[0]
    sent = [rows if other == (rank + 1) % size else 0 for other in range(size)]
    received = [rows if other == (rank - 1) % size else 0 for other in range(size)]
    return wait(_begin(x, received, sent, group_name))
