"""What DDP or FSDP2 around a graph adds to its report: what a split costs, and what to change.

A graph ends where DDP's forward ends, at FSDP2's hooks, and where one of DDP's buckets is full. So
a head and its loss can be in different graphs although one function computes both. The usual
advice, to compile a function that returns the loss, does not help there.
"""

from __future__ import annotations

import dataclasses

from mstpass.byte_sizes import bytes_text
from mstpass.graph.sizes import hint_numel
from mstpass.plans import Rejection
from mstpass.regions.advice import is_output
from mstpass.report.report import Report
from mstpass.torch_internals.data_parallel import DDP, FSDP2, Split, Wrapper

_ONE_GRAPH = (
    "give DDP a larger bucket_cap_mb, or set torch._dynamo.config.optimize_ddp = False, with which "
    "DDP reduces no gradient before the backward of the whole graph is over"
)
_CUT = (
    "a bucket of DDP ends the graph inside of this part of the model, so its large values exist in "
    "full"
)
_RETURNED = {
    DDP: "let the module that DDP wraps compute the loss and return it alone: DDP's forward ends "
    "the graph, so a loss outside of it is in another graph",
    FSDP2: "let one module that FSDP2 wraps hold the head, compute the loss and return it alone: "
    "FSDP2's hooks end the graph before and after a module that it wraps",
}


def with_wrapper(report: Report, wrapper: Wrapper) -> Report:
    """The report, with notes and advice for a graph inside of this wrapper."""
    if not wrapper.name:
        return report
    outcome = report.outcome
    notes = [_note(wrapper.split)] if wrapper.split else []
    return report.with_outcome(
        rejections=tuple(_advised(rejection, wrapper) for rejection in outcome.rejections),
        notes=(*outcome.notes, *notes),
    )


def _advised(rejection: Rejection, wrapper: Wrapper) -> Rejection:
    if not is_output(rejection.reason):
        return rejection
    split = wrapper.split
    if split is None or split.part == split.parts:
        return dataclasses.replace(rejection, fix=_RETURNED[wrapper.name])
    rest = rejection.reason.partition(": ")[2]
    return dataclasses.replace(
        rejection, reason=f"{_CUT}: {rest}" if rest else _CUT, fix=_ONE_GRAPH
    )


def _note(split: Split) -> str:
    count = len(split.entering)
    size = bytes_text(sum(hint_numel(x) * x.element_size() for x in split.entering))
    values = f"{count} value{'s' if count != 1 else ''} ({size})"
    kept = f", and {values} from the parts before it stay in memory until its backward"
    return (
        f"DDP's buckets of {bytes_text(split.bucket_bytes)} split the model's graph; this is part "
        f"{split.part} of {split.parts}. Each part is planned alone{kept if count else ''}. For "
        f"one graph, {_ONE_GRAPH}"
    )
