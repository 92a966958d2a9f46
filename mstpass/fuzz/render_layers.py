"""The layers of a case as lines of ``__init__`` and of ``forward``.

In ``forward`` a layer computes ``x`` from ``x``. What it does in between is a function that
computes ``y`` from ``h``, the normed ``x``; it may use ``h``, ``a`` and ``b`` as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.templates import ACTS, NORMS, OP_PARAMETERS, OPS

HEADS = 2  # of attention
EXPERTS = 3


def of(text: str, name: str) -> str:
    """A template for ``h``, of another value."""
    return re.sub(r"\bh\b", name, text)


class Lines:
    """The source of a program while it is written.

    Attributes:
        init: what the model has: name -> expression.
        inputs: what the program is called with besides ``ids``: name -> expression.
        forward: the lines of ``forward``.
    """

    def __init__(self, case: Case):
        self.case = case
        self.init: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.forward: list[str] = []

    def add(self, *lines: str) -> None:
        self.forward += lines

    def linear(self, name: str, inner: int, outer: int, bias: bool = False) -> str:
        """A linear layer, as ``forward`` names it."""
        self.init[name] = f"nn.Linear({inner}, {outer}, bias={bias})"
        return f"self.{name}"

    def parameter(self, name: str, *shape: int) -> str:
        self.init[name] = f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) / 4)"
        return f"self.{name}"

    def norm(self, name: str, kind: str, value: str) -> str:
        """The norm of a value."""
        made, text = NORMS[kind]
        if made:
            self.init[name] = made.format(d=self.case.features)
        return of(text, value).format(n=f"self.{name}")

    def op(self, kind: str, value: str) -> str:
        """The line that does an op to a value."""
        if kind in OP_PARAMETERS:
            name, made = OP_PARAMETERS[kind]
            self.init[name] = made.format(v=self.case.vocabulary)
        return f"{value} = {of(OPS[kind], value).format(v=self.case.vocabulary)}"


# ---- layers ------------------------------------------------------------------------------------
def add_layer(lines: Lines, layer: Layer, name: str) -> None:
    """``x = layer(x)``; the names of its parameters begin with ``name``."""
    h = lines.norm(f"{name}_norm", layer.norm, "x") if layer.residual != "post" else "x"
    lines.add(f"h = {h}")
    if layer.residual == "parallel":
        d = lines.case.features
        lines.add(f"side = {lines.linear(f'{name}_side', d, d)}(h)")
    _FUNCTIONS[layer.kind](lines, layer, name)
    if layer.dropout:
        lines.add(f"y = F.dropout(y, {layer.dropout})")
    _RESIDUALS[layer.residual](lines, layer, name)


def _in_place(lines: Lines, layer: Layer, name: str) -> None:
    lines.add("x = x.clone()", "x += y")


def _scaled(lines: Lines, layer: Layer, name: str) -> None:
    lines.add(f"x = x + {lines.parameter(f'{name}_scale', lines.case.features)} * y")


def _gated(lines: Lines, layer: Layer, name: str) -> None:
    d = lines.case.features
    lines.add(f"x = x + torch.sigmoid({lines.linear(f'{name}_open', d, d)}(x)) * (y - x)")


_RESIDUALS: Mapping[str, Callable[[Lines, Layer, str], None]] = {
    "none": lambda lines, layer, name: lines.add("x = y"),
    "add": lambda lines, layer, name: lines.add("x = x + y"),
    "post": lambda lines, layer, name: lines.add(
        f"x = {lines.norm(f'{name}_norm', layer.norm, '(x + y)')}"
    ),
    "sandwich": lambda lines, layer, name: lines.add(
        f"x = x + {lines.norm(f'{name}_after', layer.norm, 'y')}"
    ),
    "scaled": _scaled,
    "gated": _gated,
    "parallel": lambda lines, layer, name: lines.add("x = x + y + side"),
    "in_place": _in_place,
}


def _ops(lines: Lines, layer: Layer, value: str) -> None:
    lines.add(*(lines.op(kind, value) for kind in layer.ops))


# ---- MLPs --------------------------------------------------------------------------------------
def _mlp(lines: Lines, layer: Layer, name: str) -> None:
    d, width, form = lines.case.features, layer.width, layer.form

    def linear(suffix: str, inner: int = d, outer: int = width) -> str:
        return lines.linear(f"{name}_{suffix}", inner, outer, layer.bias)

    if form == "fused_gate":
        lines.add(f"a, b = {linear('gate_up', d, 2 * width)}(h).chunk(2, -1)")
        wide = "a"
    elif form == "low_rank":
        wide = f"{linear('up', 4)}({linear('low', d, 4)}(h))"
    elif form == "flat":
        wide = f"{linear('up')}(h.flatten(0, 1)).unflatten(0, h.shape[:2])"
    elif form == "by_hand":
        wide = f"(h @ {lines.parameter(f'{name}_up', d, width)})"
    else:
        wide = f"{linear('up')}(h)"
    more = {"gated": " * {}(h)", "two_ups": " + {}(h.detach())"}.get(form, "")
    more = more.format(linear("more")) if more else " * b" if form == "fused_gate" else ""
    lines.add(f"h = {ACTS[layer.act].format(wide)}{more}")
    if form == "deep":
        lines.add(f"h = {ACTS[layer.act].format(linear('mid', width, width) + '(h)')}")
    _ops(lines, layer, "h")
    lines.add(f"y = {linear('down', width, d)}(h)")


# ---- attention ---------------------------------------------------------------------------------
def _attention(lines: Lines, layer: Layer, name: str) -> None:
    d, form = lines.case.features, layer.form
    kv = 1 if form == "grouped" else HEADS
    size = d // HEADS
    other = "states" if form == "cross" and "states" in lines.inputs else "h"

    def split(suffix: str, heads: int, value: str = "h") -> str:
        linear = lines.linear(f"{name}_{suffix}", d, heads * size, layer.bias)
        return f"{linear}({value}).unflatten(-1, ({heads}, {size})).transpose(1, 2)"

    lines.add(
        f"q = {split('q', HEADS)}", f"k = {split('k', kv, other)}", f"v = {split('v', kv, other)}"
    )
    if form == "normed":
        lines.add(f"q, k = F.rms_norm(q, ({size},)), F.rms_norm(k, ({size},))")
    if form == "rotary":
        lines.add(
            "angle = torch.arange(h.shape[1])[:, None]",
            f"angle = angle / torch.arange(1, {size} + 1, dtype=h.dtype)",
            "cos, sin = angle.cos().to(h.dtype), angle.sin().to(h.dtype)",
            f"q = q * cos + torch.cat((-q[..., {size // 2} :], q[..., : {size // 2}]), -1) * sin",
            f"k = k * cos + torch.cat((-k[..., {size // 2} :], k[..., : {size // 2}]), -1) * sin",
        )
    lines.add(*_mixed(lines, form, size), "a = a.transpose(1, 2).flatten(2)")
    _ops(lines, layer, "a")
    out = lines.linear(f"{name}_out", d, d, layer.bias)
    lines.add(f"y = {ACTS[layer.act].format(f'{out}(a)')}")


_SDPA = "a = F.scaled_dot_product_attention(q, k, v{})"
_CAUSAL = "torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()"


def _mixed(lines: Lines, form: str, size: int) -> tuple[str, ...]:
    """Lines that compute ``a`` from ``q``, ``k`` and ``v``."""
    softmax = f"torch.softmax(q @ k.transpose(-1, -2) / {size}**0.5{{}}, -1)"
    if form in ("causal", "rotary", "normed"):
        return (_SDPA.format(", is_causal=True"),)
    if form == "grouped":
        return (_SDPA.format(", is_causal=True, enable_gqa=True"),)
    if form == "padding":
        lines.inputs["lengths"] = "torch.randint(1, max(2, length + 1), (batch,))"
        keep = "torch.arange(h.shape[1]) < lengths[:, None]"
        return (f"keep = ({keep})[:, None, None]", _SDPA.format(", attn_mask=keep"))
    if form == "bias":
        lines.add("near = torch.arange(h.shape[1]) - torch.arange(h.shape[1])[:, None]")
        slope = lines.parameter("slope", HEADS, 1, 1)
        return (_SDPA.format(f", attn_mask=-{slope} * near.abs().to(q.dtype)"),)
    if form == "packed":
        lines.inputs["document"] = "torch.randint(3, (batch, length)).cumsum(1) // 4"
        same = "document[:, :, None] == document[:, None]"
        return (f"same = (({same}) & {_CAUSAL})[:, None]", _SDPA.format(", attn_mask=same"))
    if form == "window":
        return (f"band = {_CAUSAL}.triu(-2)", _SDPA.format(", attn_mask=band"))
    if form == "linear":
        return ("a = F.elu(q).add(1) @ (F.elu(k).add(1).transpose(-1, -2) @ v) / 8",)
    if form == "by_hand":
        return (f"a = {softmax.format('')} @ v",)
    if form == "by_hand_masked":
        return (
            f"weights = q @ k.transpose(-1, -2) / {size}**0.5",
            f"weights = weights.masked_fill(~{_CAUSAL}, torch.finfo(q.dtype).min)",
            "a = torch.softmax(wide(weights), -1).type_as(v) @ v",
        )
    if form == "sinks":
        sink = lines.parameter("sink", HEADS, 1, 1)
        return (
            f"weights = q @ k.transpose(-1, -2) / {size}**0.5",
            f"weights = torch.cat((weights, {sink}.expand(*weights.shape[:-1], 1)), -1)",
            "a = torch.softmax(weights, -1)[..., :-1] @ v",
        )
    return (_SDPA.format(""),)


# ---- what else mixes tokens, or routes them ----------------------------------------------------
def _convolution(lines: Lines, layer: Layer, name: str) -> None:
    d, form = lines.case.features, layer.form
    if form in ("causal", "depthwise", "wide"):
        outer, groups = (layer.width, 1) if form == "wide" else (d, d if form == "depthwise" else 1)
        lines.init[f"{name}_conv"] = f"nn.Conv1d({d}, {outer}, 3, groups={groups})"
        lines.add(f"y = self.{name}_conv(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)")
    elif form == "pool":
        lines.add("y = F.avg_pool1d(F.pad(h.transpose(1, 2), (2, 0)), 3, 1).transpose(1, 2)")
    else:
        lines.add("y = torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), 1)")
    lines.add(f"y = {ACTS[layer.act].format('y')}")
    _ops(lines, layer, "y")
    if form == "wide":
        lines.add(f"y = {lines.linear(f'{name}_down', layer.width, d, layer.bias)}(y)")


def _experts(lines: Lines, layer: Layer, name: str) -> None:
    d, width, form = lines.case.features, layer.width, layer.form
    up = lines.parameter(f"{name}_up", EXPERTS, d, width)
    down = lines.parameter(f"{name}_down", EXPERTS, width, d)
    router = lines.linear(f"{name}_router", d, EXPERTS)
    lines.add(f"gate = torch.softmax({router}(h), -1)")
    if form == "sorted":  # each expert has the same number of tokens, in the order of their choice
        lines.add(
            "best, expert = gate.flatten(0, 1).max(-1)",
            "order = expert.argsort(stable=True)",
            f"rows = F.pad(h.flatten(0, 1)[order], (0, 0, 0, -h.shape[:2].numel() % {EXPERTS}))",
            f"a = rows.unflatten(0, ({EXPERTS}, -1)) @ {up}",
            f"a = {ACTS[layer.act].format('a')}",
            f"a = (a @ {down}).flatten(0, 1)[: h.shape[:2].numel()] * best[order].unsqueeze(-1)",
            "y = torch.zeros_like(h).flatten(0, 1).index_add(0, order, a.type_as(h)).view(h.shape)",
        )
        return
    if form in ("top1", "top2"):
        lines.add(
            f"top = gate.topk({form[-1]}, -1)",
            "gate = torch.zeros_like(gate).scatter(-1, top.indices, top.values)",
        )
    lines.add(
        f'a = torch.einsum("bsd,edw->bsew", h, {up})',
        f"a = {ACTS[layer.act].format('a')}",
        f'y = torch.einsum("bsew,ewd,bse->bsd", a, {down}, gate)',
    )
    if form == "shared":
        lines.add(f"y = y + {lines.linear(f'{name}_shared', d, d)}(h)")


def _scan(lines: Lines, layer: Layer, name: str) -> None:
    """A gated sum over all tokens so far; with ``decay`` the older ones count less."""
    d = lines.case.features
    lines.add(f"a = {lines.linear(f'{name}_in', d, layer.width, layer.bias)}(h)")
    _ops(lines, layer, "a")
    if layer.form == "decay":
        lines.add(
            "age = torch.arange(h.shape[1])[:, None] - torch.arange(h.shape[1])",
            "a = (0.5 ** age.clamp(min=0)).tril().to(a.dtype) @ a",
        )
    else:
        lines.add("a = a.cumsum(1) / 8")
    lines.add(f"y = {lines.linear(f'{name}_out', layer.width, d)}({ACTS[layer.act].format('a')})")


_FUNCTIONS: Mapping[str, Callable[[Lines, Layer, str], None]] = {
    "mlp": _mlp,
    "attention": _attention,
    "convolution": _convolution,
    "experts": _experts,
    "scan": _scan,
}
