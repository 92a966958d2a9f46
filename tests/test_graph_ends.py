"""Where a graph ends: the advice of a report fits DDP or FSDP2 around it. No rank is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mstpass.graph.advice import RETURN_LOSS
from mstpass.plans import Outcome, Rejection
from mstpass.report import graph_ends
from mstpass.report.report import Report
from mstpass.torch_internals.collectives import DDP, FSDP2, Split, Wrapper, wrapper_of

LOGITS = RETURN_LOSS("logits are an output of the graph, so they exist in full")
PLAIN = Rejection("detect", "mm", LOGITS, fix="as always")


def _graph(outputs: Sequence[Tensor], *ops: Any) -> fx.GraphModule:
    """A graph as Dynamo's: each op reads the one before, and the last is returned."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for op in ops:
        node = graph.call_function(op, (node,))
    returned = []
    for value in outputs:
        returned.append(graph.call_function(torch.sum, (node,)))
        returned[-1].meta["example_value"] = value
    graph.output(tuple(returned))
    return fx.GraphModule(nn.Module(), graph)


def _report(
    wrapper: Wrapper,
    outputs: Sequence[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    rejection: Rejection = PLAIN,
) -> Report:
    monkeypatch.setattr(graph_ends, "wrapper_of", lambda _: wrapper)
    report = Report(Outcome(rejections=(rejection,)))
    return graph_ends.with_graph_ends(report, _graph(outputs), [])


LOSS, WIDE = torch.zeros(()), torch.zeros(8, 100)


@pytest.mark.parametrize("name", [DDP, FSDP2])
def test_logits_without_a_loss_are_for_the_wrapped_module(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rejection,) = _report(Wrapper(name), [WIDE], monkeypatch).rejections
    assert rejection.reason == LOGITS
    assert f"that {name} wraps" in rejection.fix and "compute the loss" in rejection.fix


@pytest.mark.parametrize("name", [DDP, FSDP2])
def test_logits_beside_their_loss_can_be_dropped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rejection,) = _report(Wrapper(name), [LOSS, WIDE], monkeypatch).rejections
    assert f"that {name} wraps" in rejection.fix and "'logits': 'drop'" in rejection.fix


def test_a_part_before_the_last_is_cut_by_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(2**20, 1, 2, (WIDE, LOSS))
    report = _report(Wrapper(DDP, split), [WIDE], monkeypatch)
    (rejection,) = report.rejections
    assert "a bucket of DDP ends the graph" in rejection.reason
    assert "bucket_cap_mb" in rejection.fix
    (note,) = report.outcome.notes
    assert "buckets of 1.0 MiB" in note and "part 1 of 2" in note
    assert "2 values (3.1 KiB) from the parts before it" in note


def test_other_refusals_and_graphs_without_a_wrapper_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _report(Wrapper(), [WIDE], monkeypatch).rejections == (PLAIN,)
    other = Rejection("plan", "mm", "the step's peak lies elsewhere", fix="change nothing")
    assert _report(Wrapper(DDP), [WIDE], monkeypatch, other).rejections == (other,)


@pytest.mark.parametrize(
    ("op", "peak_bytes", "said"),
    [
        (F.cross_entropy, 4000, True),
        (torch.logsumexp, 4000, True),
        (F.mse_loss, 4000, False),  # no logits
        (F.cross_entropy, 40_000, False),  # the input is small beside the peak
    ],
)
def test_a_loss_of_logits_from_elsewhere(op: Any, peak_bytes: int, said: bool) -> None:
    report = Report(Outcome(peak_bytes=peak_bytes))
    inputs = [WIDE.clone().requires_grad_()]
    rejections = graph_ends.with_graph_ends(report, _graph([LOSS], op), inputs).rejections
    assert [r.reason for r in rejections] == [
        "logits are an input of the graph, so they exist in full"
    ] * said
    assert all("in the same compiled function as the loss" in r.fix for r in rejections)


def test_evaluation_and_several_results_are_no_loss() -> None:
    report = Report(Outcome(peak_bytes=4000))
    graph = _graph([LOSS], F.cross_entropy)
    assert not graph_ends.with_graph_ends(report, graph, [WIDE]).rejections
    wide = [WIDE.clone().requires_grad_()]
    graph = _graph([LOSS, WIDE], F.cross_entropy)
    assert not graph_ends.with_graph_ends(report, graph, wide).rejections


def test_a_graph_outside_of_all_wrappers_has_none() -> None:
    assert wrapper_of(_graph([LOSS])) == Wrapper()
