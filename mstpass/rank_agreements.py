"""What the ranks of a program agree on while they compile: the bytes of a budget, and whether
backward may repeat collectives."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mstpass.captured import Captured
from mstpass.report.report import Report
from mstpass.torch_internals.collectives import Alike, has_ranks, has_store, least_of_ranks


def of_all_ranks(available_bytes: int, example_inputs: Sequence[Any]) -> int:
    """The least that any rank has left, for a graph that has a backward.

    Programs often evaluate on one rank alone, which must not wait for the others.
    """
    if not _has_backward(example_inputs):
        return available_bytes
    agreed = least_of_ranks(available_bytes)
    if agreed.alone:
        warnings.warn(
            f"mstpass: {agreed.alone}, so memory_budget='auto' counts the memory of one rank "
            "alone. Where ranks run different programs, give each a memory_budget in bytes",
            stacklevel=2,
        )
    return agreed.number


def _has_backward(inputs: Sequence[Any]) -> bool:
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def why_not_alike(graph: Captured, report: Report | None) -> str:
    """Why a plan that repeats collectives is not known to be that of all ranks; else empty.

    A rank whose plan repeats none tells the others so, and does not wait.

    Args:
        report: None: the graph came from a compile cache, and its report is lost.
    """
    if not graph.options.repeats_collectives or not has_ranks():
        return ""
    if report is None:
        lost = "the compile cache has this graph, and its report is lost"
        return lost if _has_backward(graph.inputs) else ""
    found = report.outcome.collectives
    if found is None:
        return ""
    if not has_store():
        return "ranks cannot tell each other their plans by MPI" if found.repeated else ""
    targets = (node.target for node in graph.module.graph.nodes)
    called = "\n".join(t if isinstance(t, str) else t.__name__ for t in targets)  # not its address
    alike = Alike(found.groups, hashlib.sha256(called.encode()).hexdigest())
    alike.tell(found.order)
    return alike.why_not(found.order) if found.repeated else ""
