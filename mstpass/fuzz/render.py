"""A case as short Python source: a class ``Model`` and a function ``inputs(batch, length)``.

The source is what runs, so what a failure prints is what failed. Choices that are plain leave no
trace in it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.layers import KINDS, RESIDUALS
from mstpass.fuzz.templates import (
    ACTS,
    CUTS,
    EXTRAS,
    HELPERS,
    LOGIT_OPS,
    LOSSES,
    MUTATIONS,
    NORMS,
    OPS,
    SOURCES,
)

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


_NAMED = re.compile(r"([@$#])(\w+)\[(.+?)\]")
_EXPERTS = 3
_OPS = {**OPS, **LOGIT_OPS}


def source(case: Case) -> str:
    """The program of a case."""
    lines = Lines(case)
    lines.add(f"x = {SOURCES[case.source]}")
    _add_body(lines)
    _add_head(lines)
    _add_mutations(lines)
    return _text(lines)


class Lines:
    """The source of a program while it is written.

    Attributes:
        init: what the model has: name -> expression.
        inputs: what the program is called with besides ``ids``: name -> expression.
        forward: the lines of ``forward``.
    """

    def __init__(self, case: Case, outer: Lines | None = None):
        self.case = case
        self.init: dict[str, str] = outer.init if outer else {}
        self.inputs: dict[str, str] = outer.inputs if outer else {}
        self.forward: list[str] = []

    def add(self, *templates: str, **values: object) -> None:
        """Add lines; their templates are described in layers.py."""
        lines = [self.fill(template, **values) for template in templates]
        self.forward += [line for line in lines if not line.startswith("made ")]

    def fill(self, template: str, **values: object) -> str:
        """A template with its values; what it names is made."""
        known = {"d": self.case.features, "v": self.case.vocabulary, "E": _EXPERTS, **values}

        def made(found: re.Match[str]) -> str:
            sigil, name, spec = found.groups()
            name = f"{values['n']}{name}" if name.startswith("_") else name
            if sigil == "#":
                self.inputs[name] = spec
                return name
            words = [str(known.get(word, word)) for word in spec.split()]
            if sigil == "$":
                spec = f"nn.Parameter(torch.randn({', '.join(words)}) / 4)"
            elif not spec.startswith(("nn.", "buffer ")):
                inner, outer, bias = (*words, values.get("bias", False))[:3]
                spec = f"nn.Linear({inner}, {outer}, bias={bias})"
            self.init[name] = spec
            return f"self.{name}"

        return _NAMED.sub(made, template.format(**known))

    def norm(self, name: str, kind: str, value: str) -> str:
        """The norm of a value."""
        return self.fill(_of(NORMS[kind], value), name=name)

    def add_op(self, kind: str, value: str) -> None:
        """Add the line that does an op to a value."""
        self.add(f"{value} = {_of(_OPS[kind], value)}")


def _of(template: str, name: str) -> str:
    """A template for ``h``, of another value."""
    return re.sub(r"\bh\b", name, template)


# ---- layers ------------------------------------------------------------------------------------
class _Function:
    """A function that templates call, as in ``{act:h}``."""

    def __init__(self, function: Callable[[str], str]):
        self._function = function

    def __format__(self, value: str) -> str:
        return self._function(value)


def _add_layer(lines: Lines, layer: Layer, name: str) -> None:
    """``x = layer(x)``; the names of its parameters begin with ``name``."""
    d, width = lines.case.features, layer.width
    values = {
        "n": name,
        "bias": layer.bias,
        "w": width,
        "2w": 2 * width,
        "4d": 4 * d,
        "s": d // 2,
        "half": d // 4,
        "other": "states" if "states" in lines.inputs else "h",
        "act": _Function(ACTS[layer.act].format),
        "norm": _Function(lambda value: lines.norm(f"{name}_norm", layer.norm, value)),
        "after": _Function(lambda value: lines.norm(f"{name}_after", layer.norm, value)),
    }
    lines.add("h = x" if layer.residual == "post" else "h = {norm:x}", **values)
    if layer.residual == "parallel":
        lines.add("side = @_side[d d False](h)", **values)
    for template in KINDS[layer.kind][layer.form]:
        if template.startswith("ops "):
            for op in layer.ops:
                lines.add_op(op, template.removeprefix("ops "))
        else:
            lines.add(template, **values)
    if layer.dropout:
        lines.add(f"y = F.dropout(y, {layer.dropout})")
    lines.add(*RESIDUALS[layer.residual], **values)


def _add_body(lines: Lines) -> None:
    """The layers, alone or together in a checkpoint."""
    case = lines.case
    body = Lines(case, lines)
    for number, layer in enumerate(case.layers):
        one = Lines(case, lines)
        _add_layer(one, layer, _name_of(case.layers, number))
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
        lines.forward += inner.forward
        return
    how = ""
    if policy != "plain":
        context = f"functools.partial(create_selective_checkpoint_contexts, {policy})"
        how = f", context_fn={context}"
    for name, made in lines.init.items():  # eager mode updates the statistics twice, a graph once
        if made.startswith("nn.BatchNorm1d") and f"self.{name}(" in "".join(inner.forward):
            lines.init[name] = f"nn.BatchNorm1d({lines.case.features}, track_running_stats=False)"
    lines.forward += [f"def {name}(x):", *_indented(inner.forward), "    return x"]
    lines.add(f"x = checkpoint({name}, x, use_reentrant=False{how})")


# ---- head and loss -----------------------------------------------------------------------------
def _add_head(lines: Lines) -> None:
    case = lines.case
    lines.add(f"h = {lines.norm('norm', case.final_norm, 'x')}")
    if case.loss == "none":
        lines.add("labels = ids", *LOSSES["none"])
        return
    head = Lines(case, lines)
    _add_logits(head)
    head.add(*LOSSES[case.loss], cut=CUTS.get(case.shift, "").format(":-1"))
    if case.head == "two":
        head.add("loss = loss + 0.3 * F.softplus(@second[d v](h)).mean()")
    if case.checkpoint in ("head", "all"):
        lines.forward += ["def head(h, ids):", *_indented(head.forward)]
        lines.add("    return loss, logits, labels")
        lines.add("loss, logits, labels = checkpoint(head, h, ids, use_reentrant=False)")
    else:
        lines.forward += head.forward


def _add_logits(lines: Lines) -> None:
    """``logits`` and ``labels`` of ``h`` and ``ids``, and ``teacher`` where the loss reads it."""
    case = lines.case
    if case.shift == "hidden":
        lines.add("h = h[:, :-1]")
    if case.head == "transform":
        lines.add("h = F.layer_norm(F.gelu(@dense[d d True](h)), ({d},))")
    lines.add(f"logits = {_product(lines)}")
    if case.head == "low_rank":
        lines.add("made @low[d 4] @high[4 v]", "logits = logits + @high[4 v](@low[d 4](h))")
    if case.head == "norm_after":
        lines.add("logits = F.layer_norm(logits, logits.shape[-1:])")
    for kind in case.logit_ops:
        lines.add_op(kind, "logits")
    cut = CUTS.get(case.shift, "")
    if cut:
        lines.add(f"logits = logits{cut.format(':-1')}")
    lines.add(_labels(case.shift, cut))
    if any("teacher" in line for line in LOSSES[case.loss]):
        teacher = "@teacher[nn.Linear({d}, {v}, bias=False).requires_grad_(False)]"
        lines.add(f"teacher = {teacher}(h.detach()){cut.format(':-1')}")


def _product(lines: Lines) -> str:
    case = lines.case
    if case.head == "by_hand":
        return "h @ $head[d v]"
    if case.head == "tied" and "embed" in lines.init:
        return "F.linear(h, self.embed.weight)"
    head = "@head[d v True]" if case.head == "bias" else "@head[d v]"
    if case.head == "frozen":
        head = "@head[nn.Linear({d}, {v}, bias=False).requires_grad_(False)]"
    is_flat = case.shift == "flat"
    return f"{head}(h.flatten(0, 1)).view(*h.shape[:2], {{v}})" if is_flat else f"{head}(h)"


def _labels(shift: str, cut: str) -> str:
    if shift == "labels":
        return "labels = F.pad(ids, (0, 1), value=-100)[:, 1:]"
    if shift == "hidden":
        return "labels = ids[:, 1:]"
    if shift == "views":
        return "labels = #targets[words.narrow(1, 1, length)]"
    return f"labels = ids{cut.format('1:')}"


def _add_mutations(lines: Lines) -> None:
    """Writes to buffers and inputs; those to ``scratch`` come first, as ``x`` reads it then."""
    first: list[str] = []
    for kind in lines.case.mutations:
        line = lines.fill(MUTATIONS[kind])
        (first if line.startswith("scratch") else lines.forward).append(line)
    if first:
        lines.forward[1:1] = [*first, "x = x + scratch.unsqueeze(-1)"]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


# ---- text --------------------------------------------------------------------------------------
def _text(lines: Lines) -> str:
    case = lines.case
    results = ["loss", *(EXTRAS[extra] for extra in case.extras if _is_there(extra, case))]
    body = "\n".join([*lines.forward, f"return {', '.join(results)}"])
    init = "\n".join(["super().__init__()", *map(_made, lines.init.items()), *_freeze(lines)])
    parameters = ", ".join(["self", "ids", *lines.inputs])
    words = f"torch.randint({case.vocabulary}, (batch, length{{more}}))"
    of_both = "targets" in lines.inputs  # the ids and the words that follow them
    stream = [f"    words = {words.format(more=' + 1')}"] if of_both else []
    ids = "words.narrow(1, 0, length)" if of_both else words.format(more="")
    values = [ids, *lines.inputs.values()]
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
        *stream,
        f"    return [{', '.join(values)}]",
    )
    imports = _IMPORTS + (_CHECKPOINT if "checkpoint(" in body else "")
    return "\n\n".join([imports, *helpers, "\n".join(indented)]) + "\n"


def _is_there(extra: str, case: Case) -> bool:
    if extra == "accuracy" and case.loss == "running_sum" and "token_softmax" in case.logit_ops:
        return False  # all words have the sum 1 at the last token: rounding decides the largest
    return case.loss != "none" or not re.search(r"\blogits\b", EXTRAS[extra])


def _made(item: tuple[str, str]) -> str:
    name, text = item
    if text.startswith("buffer "):
        return f'self.register_buffer("{name}", {text.removeprefix("buffer ")})'
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
