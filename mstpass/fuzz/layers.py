"""The layers of a case as lines of ``forward``, by kind and form.

Each form computes ``y`` from ``h``, the normed ``x``; it may use ``h``, ``a`` and ``b`` as it
likes. The lines are templates:

=================  ===============================================================================
``@_up[d w]``      a linear layer of this layer, from ``d`` to ``w`` features; a third word says
                   whether it has a bias (as all of the layer, if there is none)
``@name[nn....]``  another module or parameter; without ``_`` all layers share it
``$_up[d w]``      a parameter of this shape
``#name[...]``     an input of the program
``{act:...}``      the layer's activation of a value
``ops h``          the layer's ops, done to ``h``
=================  ===============================================================================

Sizes: d features, w the layer's width, s features of a head of attention, v words, E experts. A
line that begins with ``made`` only makes what it names.
"""

from __future__ import annotations

from collections.abc import Mapping

Templates = tuple[str, ...]
Forms = Mapping[str, Templates]

# ---- MLPs --------------------------------------------------------------------------------------
_WIDENED: Forms = {
    "plain": ("h = {act:@_up[d w](h)}",),
    "gated": ("h = {act:@_up[d w](h)} * @_more[d w](h)",),
    "fused_gate": ("a, b = @_gate_up[d 2w](h).chunk(2, -1)", "h = {act:a} * b"),
    "deep": ("h = {act:@_up[d w](h)}", "h = {act:@_mid[w w](h)}"),
    "low_rank": ("h = {act:@_up[4 w](@_low[d 4](h))}",),
    "flat": ("h = {act:@_up[d w](h.flatten(0, 1)).unflatten(0, h.shape[:2])}",),
    "by_hand": ("h = {act:(h @ $_up[d w])}",),
    "two_ups": ("h = {act:@_up[d w](h)} + @_more[d w](h.detach())",),
    "fused_split": ("a, b = @_gate_up[d 2w](h).split({w}, -1)", "h = {act:a} * b"),
    "fused_slices": ("a = @_gate_up[d 2w](h)", "h = {act:a[..., :{w}]} * a[..., {w}:]"),
    "fused_flat": (
        "a, b = @_gate_up[d 2w](h.flatten(0, 1)).chunk(2, -1)",
        "h = ({act:a} * b).view(*h.shape[:2], {w})",
    ),
    "tangent": (  # the tangent of the bias is a zero without memory
        "h = torch.func.jvp(lambda z: torch.tanh(@_up[d w True](z)), (h,), (h.cos(),))[1]",
    ),
    "splines": (
        "a = F.relu(1 - (h.unsqueeze(-1) - torch.linspace(-2, 2, 4).to(h.dtype)).abs())",
        "h = {act:@_up[4d w](a.flatten(2))}",
    ),
    "codes": (
        "weight = $_book[16 1][torch.arange({w} * {d}) * 7 % 16].view({w}, {d})",
        "h = {act:F.linear(h, weight)}",
    ),
    "fused_turns": ("a = @_gate_up[d 2w](h)", "h = {act:a[..., ::2]} * a[..., 1::2]"),
}
_MLPS = {name: (*lines, "ops h", "y = @_down[w d](h)") for name, lines in _WIDENED.items()}

# ---- attention, of two heads -------------------------------------------------------------------
_SPLIT = "{0} = @_{0}[d {1}]({2}).unflatten(-1, ({3}, {{s}})).transpose(1, 2)"
_SDPA = "a = F.scaled_dot_product_attention(q, k, v{})"
_CAUSAL = "torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()"
_WEIGHTS = "weights = q @ k.transpose(-1, -2) / {s}**0.5"
_ROTATED = "{0} = {0} * cos + torch.cat((-{0}[..., {{half}} :], {0}[..., : {{half}}]), -1) * sin"


def _in_groups(lines: Templates) -> Templates:
    """The same with one head of keys for all heads of queries."""
    *before, last = lines
    return (*before, f"{last.removesuffix(')')}, enable_gqa=True)")


_MIXED: dict[str, Templates] = {  # a of q, k and v
    "sdpa": (_SDPA.format(""),),
    "causal": (_SDPA.format(", is_causal=True"),),
    "padding": (
        "keep = (torch.arange(h.shape[1]) < "
        "#lengths[torch.randint(1, max(2, length + 1), (batch,))][:, None])[:, None, None]",
        _SDPA.format(", attn_mask=keep"),
    ),
    "bias": (
        "near = torch.arange(h.shape[1]) - torch.arange(h.shape[1])[:, None]",
        _SDPA.format(", attn_mask=-$slope[2 1 1] * near.abs().to(q.dtype)"),
    ),
    "by_hand": ("a = torch.softmax(q @ k.transpose(-1, -2) / {s}**0.5, -1) @ v",),
    "by_hand_masked": (
        _WEIGHTS,
        f"weights = weights.masked_fill(~{_CAUSAL}, torch.finfo(q.dtype).min)",
        "a = torch.softmax(wide(weights), -1).type_as(v) @ v",
    ),
    "grouped": (_SDPA.format(", is_causal=True, enable_gqa=True"),),
    "rotary": (
        "angle = torch.arange(h.shape[1])[:, None]",
        "angle = angle / torch.arange(1, {s} + 1, dtype=h.dtype)",
        "cos, sin = angle.cos().to(h.dtype), angle.sin().to(h.dtype)",
        _ROTATED.format("q"),
        _ROTATED.format("k"),
        _SDPA.format(", is_causal=True"),
    ),
    "packed": (
        "same = ((#document[torch.randint(3, (batch, length)).cumsum(1) // 4][:, :, None] == "
        f"document[:, None]) & {_CAUSAL})[:, None]",
        _SDPA.format(", attn_mask=same"),
    ),
    "window": (f"band = {_CAUSAL}.triu(-2)", _SDPA.format(", attn_mask=band")),
    "linear": ("a = F.elu(q).add(1) @ (F.elu(k).add(1).transpose(-1, -2) @ v) / 8",),
    "normed": (
        "q, k = F.rms_norm(q, ({s},)), F.rms_norm(k, ({s},))",
        _SDPA.format(", is_causal=True"),
    ),
    "sinks": (
        _WEIGHTS,
        "weights = torch.cat((weights, $sink[2 1 1].expand(*weights.shape[:-1], 1)), -1)",
        "a = torch.softmax(weights, -1)[..., :-1] @ v",
    ),
    "cross": (_SDPA.format(""),),
    "grouped_full": (_SDPA.format(", enable_gqa=True"),),
}
_WITH_GROUPS = ("window", "packed", "rotary")
_MIXED |= {f"grouped_{name}": _in_groups(_MIXED[name]) for name in _WITH_GROUPS}
_ONE_HEAD = ("s", "h", 1)
_KEYS = {  # size, of what value, heads
    "cross": ("d", "{other}", 2),
    **{name: _ONE_HEAD for name in _MIXED if name.startswith("grouped")},
}
GROUPED = tuple(number for number, name in enumerate(_MIXED) if name.startswith("grouped"))
_ATTENTIONS = {
    name: (
        _SPLIT.format("q", "d", "h", 2),
        *(_SPLIT.format(key, *_KEYS.get(name, ("d", "h", 2))) for key in "kv"),
        *lines,
        "a = a.transpose(1, 2).flatten(2)",
        "ops a",
        "y = {act:@_out[d d](a)}",
    )
    for name, lines in _MIXED.items()
}

# ---- what else mixes tokens, or routes them ----------------------------------------------------
_PADDED = "F.pad(h.transpose(1, 2), (2, 0))"
_CONV = f"y = @_conv[nn.Conv1d({{{{d}}}}, {{}}, 3, groups={{}})]({_PADDED}).transpose(1, 2)"
_CONVOLUTIONS: Forms = {
    "causal": (_CONV.format("{d}", 1), "y = {act:y}", "ops y"),
    "depthwise": (_CONV.format("{d}", "{d}"), "y = {act:y}", "ops y"),
    "wide": (_CONV.format("{w}", 1), "y = {act:y}", "ops y", "y = @_down[w d](y)"),
    "pool": (f"y = F.avg_pool1d({_PADDED}, 3, 1).transpose(1, 2)", "y = {act:y}", "ops y"),
    "shift": ("y = torch.cat((torch.zeros_like(h[:, :1]), h[:, :-1]), 1)", "y = {act:y}", "ops y"),
}
_ROUTED = (
    "made $_up[E d w] $_down[E w d]",
    "gate = torch.softmax(@_router[d E False](h), -1)",
)
_SUMMED = (
    'a = torch.einsum("bsd,edw->bsew", h, $_up[E d w])',
    "a = {act:a}",
    'y = torch.einsum("bsew,ewd,bse->bsd", a, $_down[E w d], gate)',
)
_TOP = "top = gate.topk({}, -1)"
_CHOSEN = "gate = torch.zeros_like(gate).scatter(-1, top.indices, top.values)"
_EXPERTS: Forms = {
    "soft": (*_ROUTED, *_SUMMED),
    "top1": (*_ROUTED, _TOP.format(1), _CHOSEN, *_SUMMED),
    "top2": (*_ROUTED, _TOP.format(2), _CHOSEN, *_SUMMED),
    "sorted": (  # each expert has the same number of tokens, in the order of their choice
        *_ROUTED,
        "best, expert = gate.flatten(0, 1).max(-1)",
        "order = expert.argsort(stable=True)",
        "rows = F.pad(h.flatten(0, 1)[order], (0, 0, 0, -h.shape[:2].numel() % {E}))",
        "a = rows.unflatten(0, ({E}, -1)) @ $_up[E d w]",
        "a = {act:a}",
        "a = (a @ $_down[E w d]).flatten(0, 1)[: h.shape[:2].numel()] * best[order].unsqueeze(-1)",
        "y = torch.zeros_like(h).flatten(0, 1).index_add(0, order, a.type_as(h)).view(h.shape)",
    ),
    "shared": (*_ROUTED, *_SUMMED, "y = y + @_shared[d d False](h)"),
}
_ACCUMULATED: Forms = {  # over all tokens so far; with "decay" the older ones count less
    "cumsum": ("a = a.cumsum(1) / 8",),
    "decay": (
        "age = torch.arange(h.shape[1])[:, None] - torch.arange(h.shape[1])",
        "a = (0.5 ** age.clamp(min=0)).tril().to(a.dtype) @ a",
    ),
    "state": (
        "state, parts = a[:, :0].transpose(1, 2) @ a[:, :0], []",
        "for part in a.chunk(4, 1):",
        "    parts.append(part + part @ state.tanh())",
        "    state = state + part.transpose(1, 2) @ part / 8",
        "a = torch.cat(parts, 1)",
    ),
}
_SCANS = {
    name: ("a = @_in[d w](h)", "ops a", *lines, "y = @_out[w d False]({act:a})")
    for name, lines in _ACCUMULATED.items()
}

KINDS: Mapping[str, Forms] = {
    "mlp": _MLPS,
    "attention": _ATTENTIONS,
    "convolution": _CONVOLUTIONS,
    "experts": _EXPERTS,
    "scan": _SCANS,
}

RESIDUALS: Forms = {  # x of x and y; {norm:...} is the layer's norm, {after:...} another like it
    "none": ("x = y",),
    "add": ("x = x + y",),
    "post": ("x = {norm:(x + y)}",),
    "sandwich": ("x = x + {after:y}",),
    "scaled": ("x = x + $_scale[d] * y",),
    "gated": ("x = x + torch.sigmoid(@_open[d d False](x)) * (y - x)",),
    "parallel": ("x = x + y + side",),
    "in_place": ("x = x.clone()", "x += y"),
}
