"""The choices of a case as Python expressions, and the helpers that some of them call.

The tables are in order: the plainest choice comes first. ``@name[...]`` and ``#name[...]`` are made
where they are named (layers.py). ``h`` is a value of shape [batch, length, any]; ``ids`` are token
numbers, [batch, length]. The precision is nowhere written down, so that a program runs in float64
as well: ``wide`` casts half precision to float32, and leaves float64 as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

_STATES = "#states[torch.randn(batch, length, {d}, requires_grad=True)]"
_EMBEDDED = "@embed[nn.Embedding({v}, {d})](ids)"
SOURCES: Mapping[str, str] = {  # of the hidden states
    "hidden": _STATES,
    "ids": _EMBEDDED,
    "ids_position": f"{_EMBEDDED} + torch.arange(ids.shape[1])[:, None].sin()",
    "plain_hidden": "#states[torch.randn(batch, length, {d})]",
    "two": f"{_EMBEDDED} + {_STATES}",
}

NORMS: Mapping[str, str] = {
    "none": "h",
    "layer": "@{name}[nn.LayerNorm({d})](h)",
    "layer_plain": "F.layer_norm(h, (h.shape[-1],))",
    "rms": "@{name}[nn.RMSNorm({d})](h)",
    "rms_by_hand": "h * torch.rsqrt(wide(h).square().mean(-1, keepdim=True) + 1e-5).type_as(h) * "
    "@{name}[nn.Parameter(torch.ones({d}))]",
    "unit": "F.normalize(h, dim=-1)",
    "group": "@{name}[nn.GroupNorm(2, {d})](h.transpose(1, 2)).transpose(1, 2)",
    "batch": "@{name}[nn.BatchNorm1d({d})](h.transpose(1, 2)).transpose(1, 2)",
}

ACTS: Mapping[str, str] = {
    "none": "{}",
    "relu": "F.relu({})",
    "gelu": "F.gelu({})",
    "gelu_tanh": 'F.gelu({}, approximate="tanh")',
    "silu": "F.silu({})",
    "tanh": "torch.tanh({})",
    "sigmoid": "torch.sigmoid({})",
    "square_relu": "F.relu({}).square()",
    "softplus": "F.softplus({})",
    "leaky_relu": "F.leaky_relu({}, 0.1)",
    "hardswish": "F.hardswish({})",
    "softmax": "torch.softmax({}, -1)",
    "exp": "torch.exp(-{})",
    "relu_in_place": "F.relu({} * 1, inplace=True)",
}

TOKENWISE: Mapping[str, str] = {
    "square": "h * h",
    "sine": "h.sin()",
    "row_softmax": "3 * torch.softmax(h, -1)",
    "row_norm": "F.layer_norm(h, (h.shape[-1],))",
    "row_scale": "h * (1 + ids % 3).to(h.dtype).unsqueeze(-1)",
    "sequence_scale": "h * (1 + ids[:, :1] % 3).to(h.dtype).unsqueeze(-1)",
    "feature_scale": "h * torch.linspace(0.5, 1.5, h.shape[-1], dtype=h.dtype)",
    "mask": "h.masked_fill((ids % 3 == 0).unsqueeze(-1), 0.0)",
    "halves": "torch.cat((h[..., h.shape[-1] // 2 :], -h[..., : h.shape[-1] // 2]), -1)",
    "flat_and_back": "h.flatten(0, 1).sin().view(h.shape)",
    "swap_and_back": "h.transpose(1, 2).sigmoid().transpose(1, 2)",
    "top": "h + h.amax(-1, keepdim=True)",
    "flip_features": "h.flip(-1)",
    "clamp": "h.clamp(-0.5, 1.5)",
    "detached_scale": "h * torch.rsqrt(1 + h.detach().square().mean(-1, keepdim=True))",
    "sort_features": "h + h.sort(-1).values",
    "strided": "h[..., ::2].repeat_interleave(2, -1)[..., : h.shape[-1]]",
    "wide_and_back": "wide(h).sigmoid().type_as(h)",
}
MIXING: Mapping[str, str] = {
    "running_sum": "h.cumsum(1) / 8",
    "token_softmax": "torch.softmax(h, 1)",
    "flip_tokens": "h.flip(1)",
    "roll_tokens": "h + h.roll(1, 1)",
    "center": "h - h.mean(1, keepdim=True)",
    "shift": "h + F.pad(h, (0, 0, 1, -1))",
    "self_product": "torch.softmax(h @ h.transpose(1, 2), -1) @ h",
    "mean_of_all": "h + h.mean()",
    "last_token": "h + h[:, -1:]",
    "pad_tokens": "F.pad(h[:, 1:], (0, 0, 0, 1))",
    "roll_by_hand": "torch.cat((h[:, 1:], h[:, :1]), 1)",
    "all_running_sums": "h.flatten(0, 1).cumsum(0).view(h.shape) / 8",
    "all_softmax": "torch.softmax(h.flatten(0, 1), 0).view(h.shape)",
    "center_all": "h - h.mean((0, 1))",
    "alternate_softmax": "torch.log_softmax(torch.log_softmax(torch.log_softmax(h, -1), 1), -1)",
}
OPS: Mapping[str, str] = {**TOKENWISE, **MIXING}
LOGIT_OPS: Mapping[str, str] = {
    "cap": "torch.tanh(h / 3.0) * 3.0",
    "scale": "h * 0.5",
    "wide": "wide(h)",
    "temperature": "h / @temperature[nn.Parameter(torch.tensor(0.7))]",
    "bias": "h + @word_bias[nn.Parameter(torch.randn({v}))]",
    "hide_words": "h.masked_fill(torch.arange({v}) % 5 == 4, -8.0)",
    "detached_max": "h - h.detach().amax(-1, keepdim=True)",
    **MIXING,
}

_CE = "F.cross_entropy(logits.flatten(0, 1), labels.flatten(){})"
_CE_SUM, _CE_NONE = (_CE.format(f', reduction="{kind}"') for kind in ("sum", "none"))
_LOG_P = (
    "words = labels.clamp_min(0).unsqueeze(-1)",
    "log_p = torch.log_softmax(logits, -1).gather(-1, words).squeeze(-1)",
)
_Losses = Mapping[str, tuple[str, ...]]  # ``cut`` cuts ``h`` as the logits and labels are
_PAIRS = (
    "one = F.normalize(@head_one[d d](h.flatten(0, 1)), dim=-1)",
    "other = F.normalize(@head_other[d d](h.flatten(0, 1)), dim=-1)",
    "pairs = one @ other.t() * @pair_scale[nn.Parameter(torch.tensor(1.5))].exp()",
    "own = torch.arange(pairs.shape[0])",
)
PAIR_LOSSES: _Losses = {
    "contrastive": (
        *_PAIRS,
        "pairs = pairs + @pair_bias[nn.Parameter(torch.tensor(-1.0))]",
        "loss = F.cross_entropy(pairs, own) + F.cross_entropy(pairs.t(), own)",
    ),
    "one_direction": (*_PAIRS, "loss = F.cross_entropy(pairs, own)"),
    "column_softmax": (
        *_PAIRS,
        "loss = -torch.log_softmax(pairs, 0).gather(1, own[:, None]).mean()",
    ),
    "column_mean": (*_PAIRS, "loss = F.cross_entropy(pairs - pairs.mean(0), own)"),
    "standardized": (
        "words = logits.flatten(0, 1)",
        "words = (words - words.mean(0)) * torch.rsqrt(words.var(0, correction=0) + 1e-3)",
        "loss = F.cross_entropy(words, labels.flatten())",
    ),
    "balanced": (
        "target = torch.softmax(logits.detach().flatten(0, 1), -1)",
        "target = target / target.sum(0)",
        "target = target / target.sum(-1, keepdim=True)",
        "loss = -(target * torch.log_softmax(logits.flatten(0, 1), -1)).sum(-1).mean()",
    ),
}
_STACK = "heads = torch.stack([logits, @head_b[d v](h{cut}), @head_c[d v](h{cut})])"
_BATCHED = "heads = h{cut}.flatten(0, 1) @ $heads[3 d v]"
_EACH = "loss = sum(F.cross_entropy({}, labels.flatten()) for part in heads.unbind())"
STACKED_LOSSES: _Losses = {
    "stack": (_STACK, _EACH.format("part.flatten(0, 1)")),
    "stack_in_one": (
        _STACK,
        "loss = F.cross_entropy(heads.flatten(0, 2), torch.stack([labels] * 3).flatten())",
    ),
    "mixture": (
        _STACK,
        "log_p = torch.logsumexp(torch.log_softmax(heads, -1), 0)",
        "loss = -log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).mean()",
    ),
    "batched_heads": (_BATCHED, _EACH.format("part")),
    "batched_in_one": (
        _BATCHED,
        "loss = F.cross_entropy(heads.flatten(0, 1), labels.flatten().repeat(3))",
    ),
}
_DOUBLE = "words = @head_twice[d v](torch.cat((h{{cut}}, {})))"
_DROPPED, _SINE = _DOUBLE.format("F.dropout(h{cut}, 0.1)"), _DOUBLE.format("2 * h{cut}.sin()")
_HALVES = "one, other = words[: h.shape[0]], words[h.shape[0] :]"
_CE_OF = "F.cross_entropy({}.flatten(0, 1), labels.flatten())"
_KL = 'F.kl_div(torch.log_softmax({}, -1), torch.softmax({}, -1), reduction="batchmean")'
_BOTH = f"loss = {_CE_OF.format('one')} + {_CE_OF.format('other')}"
DOUBLED_LOSSES: _Losses = {
    "r_drop": (
        _DROPPED,
        "one, other = words.chunk(2)",
        f"{_BOTH} + {_KL.format('one', 'other')} + {_KL.format('other', 'one')}",
    ),
    "halves": (_SINE, _HALVES, f"{_BOTH} + 0.1 * (one - other).square().mean()"),
    "crops": (
        _SINE,
        "one, other = words.unflatten(0, (2, h.shape[0])).unbind()",
        "target = torch.softmax(2 * one.detach(), -1)",
        "loss = -(target * torch.log_softmax(other, -1)).sum(-1).mean()",
    ),
    "joined": (
        "words = torch.cat((logits, @head_twice[d v](h{cut})))",
        "loss = F.cross_entropy(words.flatten(0, 1), torch.cat((labels, labels)).flatten())",
    ),
}
_CE_PART = 'F.cross_entropy({}, words, reduction="sum")'
LOSSES: _Losses = {
    "cross_entropy": (f"loss = {_CE.format('')}",),
    "sum": (f"loss = {_CE_SUM} / 100",),
    "smoothing": (f"loss = {_CE.format(', label_smoothing=0.1')}",),
    "class_weights": (
        "class_weight = torch.linspace(0.5, 1.5, {v}, dtype=logits.dtype)",
        f"loss = {_CE.format(', weight=class_weight')}",
    ),
    "z_loss": (f"loss = {_CE.format('')} + 0.01 * torch.logsumexp(logits, -1).square().mean()",),
    "log_probabilities": (*_LOG_P, "loss = -(log_p * (labels % 5 != 0)).mean()"),
    "num_items": (f"loss = {_CE_SUM} / (labels != -100).sum()",),
    "policy_gradient": (
        *_LOG_P,
        "ratio = torch.exp(log_p - (log_p.detach() + 0.1 * (labels % 3)))",
        "gain = (labels[:, :1] % 5) - 1.5",
        "loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean(1).mean()",
    ),
    "preference": (
        *_LOG_P,
        "total = log_p.sum(1)",
        "loss = -F.logsigmoid(0.1 * (total[:1] - total)).mean()",
    ),
    "entropy": (
        "log_p = torch.log_softmax(logits, -1)",
        f"loss = {_CE.format('')} + 0.1 * (log_p.exp() * log_p).sum(-1).mean()",
    ),
    "distillation": (
        "student = torch.log_softmax(logits / 2, -1)",
        'loss = F.kl_div(student, torch.softmax(teacher, -1), reduction="batchmean")',
    ),
    "multi_hot": (
        "words = F.one_hot(labels.clamp_min(0), {v}).to(logits.dtype)",
        "loss = F.binary_cross_entropy_with_logits(logits, words)",
    ),
    "mse": ("loss = F.mse_loss(logits, teacher)",),
    "sorted": (
        "target = torch.softmax(teacher, -1).sort(-1, descending=True).values",
        "words = torch.softmax(logits, -1).sort(-1, descending=True).values",
        "loss = (words - target).square().sum(-1).mean()",
    ),
    "uncertain": (
        *_LOG_P,
        "each = torch.log_softmax(logits, -1)",
        "each = -(each.exp() * each).sum(-1).detach()",
        "loss = -(log_p * (each >= each.mean()).to(log_p.dtype)).mean()",
    ),
    "whitened": (
        "rows = wide(h).flatten(0, 1)[:, :4]",
        "gram = rows.t() @ rows + torch.eye(4).to(rows.dtype)",
        f"loss = {_CE.format('')} - 0.1 * torch.linalg.cholesky(gram).diagonal().log().sum()",
    ),
    "per_token": (f"loss = {_CE_NONE}",),
    "per_sequence": (*_LOG_P, "loss = log_p.sum(1)"),
    "balance": (
        "words = (3 * logits).softmax(-1).mean((0, 1))",
        "loss = (words.log() * torch.linspace(0.5, 1.5, {v}, dtype=words.dtype)).sum() / 100",
    ),
    "sine_sum": ("loss = logits.sin().sum() / 100",),
    "ignore_all": (
        "labels = torch.full_like(labels, -100)",
        f"loss = {_CE_SUM}",
    ),
    "focal": (*_LOG_P, "loss = -((1 - log_p.exp()).square() * log_p).mean()"),
    "top_margin": (
        "top = logits.topk(2, -1).values",
        "loss = F.softplus(1 - (top[..., 0] - top[..., 1])).mean()",
    ),
    "stacked": (
        "both = torch.stack([logits, 0.5 * logits.sin()], 2)",
        "loss = torch.logsumexp(both, 2).square().mean()",
    ),
    "split": (
        "parts = zip(logits.chunk(3, 1), labels.chunk(3, 1))",
        "loss = sum(F.cross_entropy(part.flatten(0, 1), words.flatten()) for part, words in parts)",
    ),
    "chunks": (
        "parts = zip(logits.flatten(0, 1).chunk(4), labels.flatten().chunk(4))",
        f"loss = sum({_CE_PART.format('part')} for part, words in parts) / 100",
    ),
    "chunks_by_hand": (
        "parts = zip(h{cut}.flatten(0, 1).chunk(4), labels.flatten().chunk(4))",
        f"loss = sum({_CE_PART.format('@head_parts[d v](part)')} for part, words in parts) / 100",
    ),
    **STACKED_LOSSES,
    **DOUBLED_LOSSES,
    # these mix tokens
    **PAIR_LOSSES,
    "pairs": (
        "unit = F.normalize(logits.flatten(0, 1), dim=-1)",
        "sign = 2 * torch.eye(unit.shape[0], dtype=unit.dtype) - 1",
        "loss = -F.logsigmoid(sign * (10 * unit @ unit.t() - 10)).mean()",
    ),
    "symmetric": (
        "z = h[:, :12].unsqueeze(2) * h[:, :12].unsqueeze(1)",
        "z = @head_pairs[d v](z + z.transpose(1, 2))",
        f"loss = {_CE.format('')} + torch.logsumexp(z, -1).square().sum() / 100",
    ),
    "recursion": (
        "state = logits.sum(1)[..., :16]",
        "for step in logits[:, :9, :16].unbind(1):",
        "    between = $between[16 16][: step.shape[-1], : step.shape[-1]]",
        "    state = step + torch.logsumexp(state.unsqueeze(-1) + between, 1)",
        f"loss = {_CE.format('')} + torch.logsumexp(state, -1).sum() / 100",
    ),
    "upsampled": (
        'words = F.interpolate(logits.transpose(1, 2), scale_factor=2.0, mode="linear")',
        "loss = F.cross_entropy(words, labels.repeat_interleave(2, 1))",
    ),
    "token_softmax": ("loss = torch.softmax(logits, 1).square().sum()",),
    "running_sum": ("logits = logits.cumsum(1) / 8", f"loss = {_CE.format('')}"),
    "neighbours": ("logits = logits + logits.roll(1, 1)", f"loss = {_CE.format('')}"),
    "centered": ("logits = logits * logits.mean((0, 1)).cos()", f"loss = {_CE.format('')}"),
    "mean_of_sequence": ("loss = logits.mean(1).square().sum()",),
    "token_max": ("loss = logits.amax(1).square().mean()",),
    "none": ("loss = h.sin().mean()",),
}

EXTRAS: Mapping[str, str] = {
    "logits": "logits",
    "hidden": "h",
    "hidden_view": "x[:, -1:]",
    "metric": "2 * loss.detach()",
    "second_loss": "x.square().mean()",
    "unused": "x.detach().exp()",
    "input": "ids",
    "accuracy": "(logits.detach().argmax(-1) == labels).sum()",
    "alias": "x.view(-1)",
    "labels_view": "ids[:, 1:]",
}

MUTATIONS: Mapping[str, str] = {  # writes to buffers and inputs
    "counter": "@count[buffer torch.zeros((), dtype=torch.long)].add_(1)",
    "running_mean": "@average[buffer torch.zeros({d})]"
    ".lerp_(x.detach().mean((0, 1)).to(self.average.dtype), 0.1)",
    "input_counter": "#steps[torch.zeros((), dtype=torch.long)].add_(1)",
    "input_scaled": "#scratch[torch.randn(batch, length)].mul_(0.5)",
    "input_view": "#scratch[torch.randn(batch, length)][:, :1].add_(1)",
}

CUTS: Mapping[str, str] = {  # of logits and labels
    "logits": "[:, {}]",
    "first": "[:, 3:]",
    "every_other": "[:, ::2]",
    "last": "[:, -1:]",
}

POLICIES: Mapping[str, str] = {  # of selective checkpoints
    "save_products": """\
def save_products(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
""",
    "prefer_products": """\
def prefer_products(context, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.PREFER_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
""",
    "recompute_all": """\
def recompute_all(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE
""",
    "save_attention": """\
def save_attention(context, op, *args, **kwargs):
    saved = "scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE
""",
}
HELPERS: Mapping[str, str] = {  # put before the model where its source has the name
    "wide": """\
def wide(h):
    return h.float() if h.dtype == torch.bfloat16 else h
""",
    **POLICIES,
}
