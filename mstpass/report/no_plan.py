"""Why a part of a step has no plan: mstpass plans graphs that a backward follows.

None follows evaluation, generation and an optimizer's update. Where a function takes gradients
itself (``torch.autograd.grad``, ``torch.func.grad``, per-sample gradients), its graph holds them.
Of calls of an RNN there is no graph at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from mstpass.graph.source_location import source_of
from mstpass.plans import Outcome
from mstpass.report.report import Report
from mstpass.torch_internals.dynamo import compiles_rnns

_DERIVATIVES = {"grad", "_autograd_grad", "_make_dual"}  # calls of torch.autograd and torch.func
_IN_TORCH = ("torch.autograd", "torch._functorch")
RNN_ADVICE = (
    "torch.compile leaves out the call, or compiles nothing at all, unless "
    "torch._dynamo.config.allow_rnn = True is set"
)
_told: set[tuple[str, int | None, bool]] = set()


def why_no_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Why no backward follows a graph that Dynamo captured, in the grad mode of its caller."""
    if any(map(_takes_gradients, gm.graph.nodes)):
        return "it takes its gradients itself (torch.autograd.grad, torch.func)"
    if not torch.is_grad_enabled():
        return "gradients are off (torch.no_grad, torch.inference_mode)"
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return "it reads nothing that requires a gradient"
    return "its results are detached, or computed under torch.no_grad"


def rnn_left_out(roots: Iterable[nn.Module]) -> str:
    """What to do for torch to compile an RNN of these modules; "" if it does, or has none."""
    held = [type(module) for root in roots for module in root.modules()]
    kinds = (nn.RNN, nn.GRU, nn.LSTM)
    rnn = next((kind for kind in kinds if any(issubclass(each, kind) for each in held)), None)
    if rnn is None or compiles_rnns():
        return ""
    return f"of a function that calls an nn.{rnn.__name__}, {RNN_ADVICE}"


def without_plan(gm: fx.GraphModule, inputs: Sequence[Any]) -> Report:
    """The report of a graph that Inductor compiled, and that has no backward."""
    calls = (node for node in reversed(gm.graph.nodes) if node.op.startswith("call"))
    place = next(filter(None, map(source_of, calls)), "")
    reason = f"no backward follows this graph, because {why_no_backward(gm, inputs)}"
    notes = (f"the graph ends at {place}",) if place else ()
    return Report(Outcome(no_plan=reason, notes=notes))


def lost() -> Report:
    """That of a graph from a compile cache beside which there is none."""
    reason = "the graph came from a compile cache, and its report is lost"
    return Report(Outcome(no_plan=reason), cached=True)


def warn_of_budget(outcome: Outcome, budget_bytes: int | None, message: str) -> None:
    """Warn that a budget is exceeded; of graphs without a plan once for all of a kind.

    Programs evaluate often, and what they evaluate has many lengths.
    """
    kind = (outcome.no_plan, budget_bytes, outcome.scheduled_peak_bytes is None)
    if outcome.no_plan and kind in _told:
        return
    _told.add(kind)
    warnings.warn(f"mstpass: {message}", stacklevel=4)


def _takes_gradients(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith(_IN_TORCH) and getattr(node.target, "__name__", "") in _DERIVATIVES
