"""What the ends of a graph add to its report: where DDP or FSDP2 cut the step, and at what cost.

A graph ends where DDP's forward ends, at FSDP2's hooks, and where one of DDP's buckets is full. So
a head and its loss can be in different graphs although one function computes both. Then the logits
are an output of one graph and an input of another, and the usual advice, to compile a function that
returns the loss, does not help.

Why a part of a step has no plan: mstpass plans graphs that a backward follows.

None follows evaluation, generation and an optimizer's update. Where a function takes gradients
itself (``torch.autograd.grad``, ``torch.func.grad``, per-sample gradients), its graph holds them.
Of calls of an RNN there is no graph at all.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from mstpass.byte_sizes import bytes_text
from mstpass.graph.advice import LOSS_IN_GRAPH, is_output
from mstpass.graph.node_meta import source_of
from mstpass.graph.sizes import hint_numel
from mstpass.plans import Outcome, Rejection
from mstpass.report.report import Report
from mstpass.torch_internals.collectives import DDP, FSDP2, Split, Wrapper, wrapper_of
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


# ---- the ends of graphs --------------------------------------------------------------------------
_ONE_GRAPH = (
    "give DDP a larger bucket_cap_mb, or set torch._dynamo.config.optimize_ddp = False, with which "
    "DDP reduces no gradient before the backward of the whole graph is over"
)
_CUT = (
    "a bucket of DDP ends the graph inside of this part of the model, so its large values exist in "
    "full"
)
_APART = {
    DDP: "let the module that DDP wraps compute the loss and return it alone: DDP's forward ends "
    "the graph, so a loss outside of it is in another graph",
    FSDP2: "let one module that FSDP2 wraps hold the head, compute the loss and return it alone: "
    "FSDP2's hooks end the graph before and after a module that it wraps",
}
_BESIDE_LOSS = (
    "let the module that {} wraps return the loss alone, or, if nobody reads the logits, set "
    "options={{'logits': 'drop'}}"
)
_LOGITS_SHARE = 0.5  # of the peak of a loss's graph


def with_graph_ends(report: Report, gm: fx.GraphModule, inputs: Sequence[Any]) -> Report:
    """The report, with what follows from where this graph of Dynamo's begins and ends."""
    wrapper = wrapper_of(gm)
    outcome = report.outcome
    has_loss = any(map(_is_number, _returned(gm)))
    rejections = [_advised(rejection, wrapper, has_loss) for rejection in outcome.rejections]
    logits_bytes = _logits_bytes(gm, inputs)
    if logits_bytes and not report.regions and logits_bytes >= _LOGITS_SHARE * _peak(report):
        reason = LOSS_IN_GRAPH("logits are an input of the graph, so they exist in full")
        logits = Rejection("detect", "logits", reason, bytes=logits_bytes)
        rejections.append(_fixed(logits, wrapper))
    notes = [_note(wrapper.split)] if wrapper.split else []
    return report.with_outcome(rejections=tuple(rejections), notes=(*outcome.notes, *notes))


def _advised(rejection: Rejection, wrapper: Wrapper, has_loss: bool) -> Rejection:
    """A refused output, with advice for this wrapper; any other refusal as it is.

    Args:
        has_loss: the graph returns a number as well.
    """
    if not wrapper.name or not is_output(rejection.reason):
        return rejection
    split = wrapper.split
    if split is None or split.part == split.parts:
        if has_loss:
            return dataclasses.replace(rejection, fix=_BESIDE_LOSS.format(wrapper.name))
        return _fixed(rejection, wrapper)
    rest = rejection.reason.partition(": ")[2]
    reason = f"{_CUT}: {rest}" if rest else _CUT
    return dataclasses.replace(rejection, reason=reason, fix=_ONE_GRAPH)


def _fixed(rejection: Rejection, wrapper: Wrapper) -> Rejection:
    return dataclasses.replace(rejection, fix=_APART.get(wrapper.name, rejection.fix))


def _note(split: Split) -> str:
    count = len(split.entering)
    size = bytes_text(sum(map(_bytes, split.entering)))
    values = f"{count} value{'s' if count != 1 else ''} ({size})"
    kept = f", and {values} from the parts before it stay in memory until its backward"
    return (
        f"DDP's buckets of {bytes_text(split.bucket_bytes)} split the model's graph; this is part "
        f"{split.part} of {split.parts}. Each part is planned alone{kept if count else ''}. For "
        f"one graph, {_ONE_GRAPH}"
    )


def _logits_bytes(gm: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Of a graph that is a loss of logits, its largest input that has a gradient; else 0."""
    returned = _returned(gm)
    is_loss = bool(returned) and all(map(_is_number, returned))
    if not is_loss or not any(map(_is_softmax, gm.graph.nodes)):
        return 0
    tensors = (x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad)
    return max((_bytes(x) for x in tensors if not isinstance(x, nn.Parameter)), default=0)


def _returned(gm: fx.GraphModule) -> list[Any]:
    return [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hint_numel(value) == 1


def _is_softmax(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return any(word in name for word in ("softmax", "logsumexp", "cross_entropy"))


def _peak(report: Report) -> float:
    return report.peak_bytes if report.peak_bytes is not None else float("inf")


def _bytes(tensor: torch.Tensor) -> int:
    return hint_numel(tensor) * tensor.element_size()
