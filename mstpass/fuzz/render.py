"""A case as short Python source: a class ``Model`` and a function ``inputs(batch, length)``.

The source is what runs, so what a failure prints is what failed. Choices that are plain leave no
trace in it.
"""

from __future__ import annotations

import re
import textwrap

from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.render_layers import Lines, add_layer
from mstpass.fuzz.templates import CUTS, EXTRAS, HELPERS, LOSSES

_IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn
"""
_CHECKPOINT = """\
import functools
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
"""


def source(case: Case) -> str:
    """The program of a case."""
    lines = Lines(case)
    _add_hidden(lines)
    _add_body(lines)
    _add_head(lines)
    _add_mutations(lines)
    return _text(lines)


# ---- inputs and layers -------------------------------------------------------------------------
def _add_hidden(lines: Lines) -> None:
    case = lines.case
    d = case.features
    if case.source in ("hidden", "plain_hidden", "two"):
        grad = "" if case.source == "plain_hidden" else ", requires_grad=True"
        lines.inputs["states"] = f"torch.randn(batch, length, {d}{grad})"
    if case.source.startswith("ids") or case.source == "two":
        lines.init["embed"] = f"nn.Embedding({case.vocabulary}, {d})"
    lines.add(
        {
            "ids": "x = self.embed(ids)",
            "ids_position": "x = self.embed(ids) + torch.arange(ids.shape[1])[:, None].sin()",
            "two": "x = self.embed(ids) + states",
        }.get(case.source, "x = states")
    )


def _add_body(lines: Lines) -> None:
    """The layers, alone or together in a checkpoint."""
    case = lines.case
    body = Lines(case)
    body.init, body.inputs = lines.init, lines.inputs
    for number, layer in enumerate(case.layers):
        one = Lines(case)
        one.init, one.inputs = lines.init, lines.inputs
        add_layer(one, layer, _name_of(case.layers, number))
        _add_checkpointed(body, one, f"layer{number}", layer.checkpoint)
    whole = case.checkpoint in ("body", "all", "nested") and case.layers
    _add_checkpointed(lines, body, "body", "plain" if whole else "none")


def _name_of(layers: tuple[Layer, ...], number: int) -> str:
    """The name of a layer's parameters: that of the last layer before that it can share them of."""
    layer = layers[number]
    if layer.same:
        for other in reversed(range(number)):
            if _shapes(layers[other]) == _shapes(layer):
                return _name_of(layers, other)
    return f"l{number}"


def _shapes(layer: Layer) -> tuple[object, ...]:
    return layer.kind, layer.form, layer.norm, layer.residual, layer.width, layer.bias


def _add_checkpointed(lines: Lines, inner: Lines, name: str, policy: str) -> None:
    """Lines that compute ``x`` from ``x``, under ``torch.utils.checkpoint`` or as they are."""
    if policy == "none":
        lines.add(*inner.forward)
        return
    how = ""
    if policy != "plain":
        context = f"functools.partial(create_selective_checkpoint_contexts, {policy})"
        how = f", context_fn={context}"
    for name, made in lines.init.items():  # eager mode updates the statistics twice, a graph once
        if made.startswith("nn.BatchNorm1d") and f"self.{name}(" in "".join(inner.forward):
            lines.init[name] = f"nn.BatchNorm1d({lines.case.features}, track_running_stats=False)"
    lines.add(f"def {name}(x):", *(f"    {line}" for line in inner.forward), "    return x")
    lines.add(f"x = checkpoint({name}, x, use_reentrant=False{how})")


# ---- head and loss -----------------------------------------------------------------------------
def _add_head(lines: Lines) -> None:
    case = lines.case
    lines.add(f"h = {lines.norm('norm', case.final_norm, 'x')}")
    if case.loss == "none":
        lines.add("labels = ids", *LOSSES["none"])
        return
    head = Lines(case)
    head.init, head.inputs = lines.init, lines.inputs
    _add_logits(head)
    head.add(*(line.format(v=case.vocabulary) for line in LOSSES[case.loss]))
    if case.head == "two":
        head.add(
            f"loss = loss + 0.3 * F.softplus({head.linear('second', *_sizes(case))}(h)).mean()"
        )
    if case.checkpoint in ("head", "all"):
        lines.add("def head(h, ids):", *(f"    {line}" for line in head.forward))
        lines.add("    return loss, logits, labels")
        lines.add("loss, logits, labels = checkpoint(head, h, ids, use_reentrant=False)")
    else:
        lines.add(*head.forward)


def _sizes(case: Case) -> tuple[int, int]:
    return case.features, case.vocabulary


def _add_logits(lines: Lines) -> None:
    """``logits`` and ``labels`` of ``h`` and ``ids``, and ``teacher`` where the loss reads it."""
    case = lines.case
    d, words = _sizes(case)
    if case.shift == "hidden":
        lines.add("h = h[:, :-1]")
    if case.head == "transform":
        lines.add(f"h = F.layer_norm(F.gelu({lines.linear('dense', d, d, True)}(h)), ({d},))")
    lines.add(f"logits = {_product(lines)}")
    if case.head == "low_rank":
        low, high = lines.linear("low", d, 4), lines.linear("high", 4, words)
        lines.add(f"logits = logits + {high}({low}(h))")
    if case.head == "norm_after":
        lines.add("logits = F.layer_norm(logits, logits.shape[-1:])")
    lines.add(*(lines.op(kind, "logits") for kind in case.logit_ops))
    cut = CUTS.get(case.shift, "")
    if cut:
        lines.add(f"logits = logits{cut.format(':-1')}")
    lines.add(_labels(case.shift, cut))
    if any("teacher" in line for line in LOSSES[case.loss]):
        lines.init["teacher"] = f"nn.Linear({d}, {words}, bias=False).requires_grad_(False)"
        lines.add(f"teacher = self.teacher(h.detach()){cut.format(':-1')}")


def _product(lines: Lines) -> str:
    case = lines.case
    d, words = _sizes(case)
    if case.head == "by_hand":
        return f"h @ {lines.parameter('head', d, words)}"
    if case.head == "tied" and "embed" in lines.init:
        return "F.linear(h, self.embed.weight)"
    head = lines.linear("head", d, words, case.head == "bias")
    if case.head == "frozen":
        lines.init["head"] += ".requires_grad_(False)"
    return (
        f"{head}(h.flatten(0, 1)).view(*h.shape[:2], {words})"
        if case.shift == "flat"
        else f"{head}(h)"
    )


def _labels(shift: str, cut: str) -> str:
    if shift == "labels":
        return "labels = F.pad(ids, (0, 1), value=-100)[:, 1:]"
    if shift == "hidden":
        return "labels = ids[:, 1:]"
    return f"labels = ids{cut.format('1:')}"


def _add_mutations(lines: Lines) -> None:
    """Writes to buffers and inputs; those to ``scratch`` come first, as ``x`` reads it then."""
    d, first = lines.case.features, []
    for kind in lines.case.mutations:
        if kind == "counter":
            lines.init["buffer count"] = "torch.zeros((), dtype=torch.long)"
            lines.add("self.count.add_(1)")
        elif kind == "running_mean":
            lines.init["buffer average"] = f"torch.zeros({d})"
            lines.add("self.average.lerp_(x.detach().mean((0, 1)).to(self.average.dtype), 0.1)")
        elif kind == "input_counter":
            lines.inputs["steps"] = "torch.zeros((), dtype=torch.long)"
            lines.add("steps.add_(1)")
        else:
            lines.inputs["scratch"] = "torch.randn(batch, length)"
            first.append(
                "scratch.mul_(0.5)" if kind == "input_scaled" else "scratch[:, :1].add_(1)"
            )
    if first:
        lines.forward[1:1] = [*first, "x = x + scratch.unsqueeze(-1)"]


# ---- text --------------------------------------------------------------------------------------
def _text(lines: Lines) -> str:
    case = lines.case
    results = ["loss", *(EXTRAS[extra] for extra in case.extras if _is_there(extra, case))]
    body = "\n".join([*lines.forward, f"return {', '.join(results)}"])
    init = "\n".join(["super().__init__()", *map(_made, lines.init.items()), *_freeze(lines)])
    parameters = ", ".join(["self", "ids", *lines.inputs])
    values = [f"torch.randint({case.vocabulary}, (batch, length))", *lines.inputs.values()]
    helpers = [text for name, text in HELPERS.items() if re.search(rf"\b{name}\b", body)]
    indented = (
        "class Model(nn.Module):",
        "    def __init__(self):",
        textwrap.indent(init, 8 * " "),
        "",
        f"    def forward({parameters}):",
        textwrap.indent(body, 8 * " "),
        "",
        "",
        "def inputs(batch, length):",
        f"    return [{', '.join(values)}]",
    )
    imports = _IMPORTS + (_CHECKPOINT if "checkpoint(" in body else "")
    return "\n\n".join([imports, *helpers, "\n".join(indented)]) + "\n"


def _is_there(extra: str, case: Case) -> bool:
    return case.loss != "none" or not re.search(r"\blogits\b", EXTRAS[extra])


def _made(item: tuple[str, str]) -> str:
    name, text = item
    if name.startswith("buffer "):
        return f'self.register_buffer("{name.removeprefix("buffer ")}", {text})'
    return f"self.{name} = {text}"


def _freeze(lines: Lines) -> list[str]:
    """Lines of ``__init__`` that stop the gradients of some parameters."""
    case = lines.case
    tests = {
        "head": '"head" in name',
        "all_but_head": '"head" not in name',
        "norms": '"norm" in name',
        "biases": '"bias" in name',
    }
    if case.frozen in tests:
        condition = tests[case.frozen]
    else:
        names = {_name_of(case.layers, i) for i, l in enumerate(case.layers) if l.frozen}
        if not names:
            return []
        prefixes = ", ".join(f'"{name}_"' for name in sorted(names))
        condition = f"name.startswith(({prefixes},))"
    return [
        "for name, parameter in self.named_parameters():",
        f"    parameter.requires_grad_(parameter.requires_grad and not ({condition}))",
    ]
