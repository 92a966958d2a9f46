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
from mstpass.torch_internals.data_parallel import DDP, FSDP2, Wrapper

_ONE_GRAPH = (
    "give DDP a larger bucket_cap_mb, or set torch._dynamo.config.optimize_ddp = False, with which "
    "DDP reduces no gradient before the backward of the whole graph is over"
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
    return report.with_outcome(
        rejections=tuple(_advised(rejection, wrapper) for rejection in outcome.rejections),
        notes=(*outcome.notes, *_notes(wrapper)),
    )


def _advised(rejection: Rejection, wrapper: Wrapper) -> Rejection:
    if not is_output(rejection.reason):
        return rejection
    fix = _RETURNED[wrapper.name]
    if wrapper.bucket_bytes:
        fix += f"; where the graph ends here because a bucket of DDP is full, {_ONE_GRAPH}"
    return dataclasses.replace(rejection, fix=fix)


def _notes(wrapper: Wrapper) -> tuple[str, ...]:
    if not wrapper.bucket_bytes:
        return ()
    count = len(wrapper.entering)
    size = bytes_text(sum(hint_numel(x) * x.element_size() for x in wrapper.entering))
    kept = (
        f"{count} value{'s' if count != 1 else ''}, {size}, come from the parts before it and stay "
        "in memory until its backward"
        if count
        else "it is the first part"
    )
    return (
        f"DDP's buckets of {bytes_text(wrapper.bucket_bytes)} split the graph of the model, and "
        f"each part is planned alone. This is one part: {kept}. For one graph, {_ONE_GRAPH}",
    )
