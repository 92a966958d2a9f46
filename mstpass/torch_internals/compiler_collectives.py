"""Agree with the other ranks on a number, while graphs are compiled.

A rank that compiles alone must not wait for the others for ever. There are two ways to ask them:

- ``torch._dynamo.config.enable_compiler_collectives`` (``TORCH_COMPILER_COLLECTIVES=1``) is the
  user's promise that all ranks compile at the same time, under which Dynamo itself talks to the
  other ranks for each graph. Then a collective asks them.
- Otherwise the store of the process group does. Each rank writes down its number for the *first*
  compilation of each frame, and waits for those of the others. Ranks that run the same program
  reach the same frame for the first time in the same step, whatever the length of their batches.
  They may compile a frame *again* at different times: then nobody is asked, and the number is at
  most what the ranks agreed on when they compiled the frame first.

A rank whose number does not come within ``PATIENCE_S`` runs another program. From then on this one
asks nobody any more, and writes that down too, so that nobody waits for it.

Source: torch/_dynamo/distributed.py, torch/_dynamo/output_graph.py (``run_compiler_collective``),
torch/_guards.py (``CompileId``), torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch.distributed as dist
from torch._dynamo.distributed import get_compile_pg
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch

from mstpass.torch_internals.private_apis import PrivateApis

APIS = PrivateApis(
    names=(
        "torch._dynamo.config.enable_compiler_collectives",
        "torch._dynamo.distributed.get_compile_pg",
        "torch._guards.CompileContext.current_compile_id",
        "torch._guards.CompileId",
        "torch._subclasses.fake_tensor.unset_fake_temporarily",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.utils._mode_utils.no_dispatch",
    ),
)
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
        self.group, self.alone = group, ""
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
        except RuntimeError as error:  # of the store, or of the network
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


_questions: _Questions | None = None


def least_of_ranks(number: int) -> Agreed:
    """The least of the numbers that all ranks call this with, where they can be asked."""
    group = get_compile_pg()
    if group is not None:
        numbers = [number] * group.size()
        with no_dispatch(), unset_fake_temporarily():
            dist.all_gather_object(numbers, number, group=group)
        return Agreed(min(numbers))
    frame = CompileContext.current_compile_id()
    if frame is None or not _has_ranks():
        return Agreed(number)
    questions = _questions_to_ranks()
    if questions.alone:
        return Agreed(number, questions.alone)
    if frame.frame_compile_id != 0:  # again, and perhaps no other rank does so now
        return Agreed(min(number, questions.agreed.get(frame.frame_id, number)))
    try:
        agreed = questions.least(number)
    except RuntimeError as error:  # the store is gone, or lost its connection
        questions.alone = f"the store of the process group failed ({error})"
        return Agreed(number, questions.alone)
    questions.agreed[frame.frame_id] = agreed.number
    return agreed


def _has_ranks() -> bool:
    if not dist.is_available() or not dist.is_initialized():
        return False
    # ranks of a fake group do not exist, and MPI has no store
    return dist.get_world_size() > 1 and dist.get_backend() not in ("fake", "mpi")


def _questions_to_ranks() -> _Questions:
    """What was asked in the process group that there is now; a new group starts anew."""
    global _questions
    world = dist.group.WORLD
    if _questions is None or _questions.group is not world:
        _questions = _Questions(world)
    return _questions


def probe() -> None:
    APIS.require()
    APIS.expect(get_compile_pg() is None or dist.is_initialized(), "a group without processes")
    APIS.expect(
        CompileContext.current_compile_id() is None, "a compilation without anything to compile"
    )
