"""What a user can change about a refusal: one table from reasons to advice.

Reasons are made where something is refused, often deep in an op's token rule; what helps is the
same for many of them, and is said in the user's terms.
"""

from __future__ import annotations

import dataclasses
import re

from mstpass.plans import Rejection

_ROWWISE = (
    "on the wide value, work token by token: take statistics, softmax or sorting over tokens of "
    "the narrow input, or of the losses of the tokens; of contrastive pairs take a product for "
    "each side, `a @ b.t()` and `b @ a.t()`"
)
_PICK = (
    "pick tokens before the widening product, `head(h[:, -1])` instead of `head(h)[:, -1]`; leave "
    "tokens out of a loss by `ignore_index` or torch.where, not by a mask as index"
)
_LAYOUT = (
    "keep tokens and features in dims of their own: flatten batch and sequence together, and "
    "nothing else with them"
)
_REPORT = "a limit of mstpass, not of your code: please report it, with options={'strict': True}"
_BUDGET = "nothing to change; a lower memory_budget may want it in chunks, chunk_tokens forces them"

_OUTPUT = r"(are|is) an output( of the graph)?"

# The first that is found in a reason.
_ADVICE = (
    (
        r"logits are an output of the graph",
        "compile a function that returns only the loss, computed inside of it, such as "
        "`lambda batch: model(**batch).loss`",
    ),
    (r"large value is an output", "return what is computed from it, or leave it out"),
    (_OUTPUT, "return its sum or mean over tokens instead, or leave it out"),
    (
        r"other than the tokens' is symbolic",
        "make it static: hold the weights in a module, or torch._dynamo.mark_static(tensor, dim)",
    ),
    (r"fit in one chunk of chunk_tokens", "give a smaller chunk_tokens, or leave it out"),
    (
        r"fewer than two chunks|^\d+ token$",
        "train on more tokens at once; chunk_tokens forces a length",
    ),
    (r"would hold as much memory", "nothing to change; memory_budget=0.0 recomputes where it can"),
    (r"peak lies elsewhere|to save in chunks gains nothing", _BUDGET),
    (
        r"nothing to gain",
        "nothing to change: a product that only widens, such as attention's fused QKV, has no "
        "large values between its input and its result",
    ),
    (r"products in a row", "nothing to change: they are loops of their own instead"),
    (r"nothing outside uses", "return a loss that depends on it, or leave the computation out"),
    (
        r"outside the region, uses a large value",
        "that line reads the wide value itself; give it what is reduced token by token, such as an "
        "argmax or a log-probability, or leave it out of the step",
    ),
    (
        r"token rule for (aten|prims)\.",
        "mstpass does not know how this op treats tokens: apply it where values are narrow (before "
        "the widening product or after the loss), or write it with other ops; please report it",
    ),
    (
        r"token rule for",
        "write it with ATen ops (plain torch, no custom or opaque op), or apply it where values "
        "are narrow: before the widening product or after the loss",
    ),
    (
        r"draws (random numbers|a random seed)",
        "a chunk cannot draw its part of them: move dropout to where values are narrow, or set p=0",
    ),
    (
        r"writes to its operands",
        "use the out-of-place form, `x = x.add(y)` for `x.add_(y)`; buffers that a step updates "
        "belong outside of it",
    ),
    (
        r"attention|neighbouring positions",
        "nothing to change: what attention or a convolution reads is needed whole",
    ),
    (r"grouped by expert", "nothing to change: only dense MLPs are taken so far"),
    (r"size (of .*)?depends on data", _PICK),
    (
        r"picks (single )?tokens|writes single tokens|writes at indices|adds rows at indices"
        r"|indexed dims|embedding table|tokens that a slice drops",
        _PICK,
    ),
    (
        r"reduces over|along (a|the) token dim|normalizes over tokens|over all elements"
        r"|whole tensors|sum over tokens is used|without dims|sums nothing|contracts tokens"
        r"|itself|two roles|bias and factor|depend on tokens|features of an embedding",
        _ROWWISE,
    ),
    (
        r"token dims|tokens over several dims|not by dims|an operand of .* is not a tensor"
        r"|several results|not one tensor",
        _LAYOUT,
    ),
    (
        r"belongs to another region",
        "nothing to change: what reads it is in chunks already, with another part",
    ),
    (
        r"lies between two parts",
        "let each widening product have values of its own: two of them share what is computed here",
    ),
    (
        r"must_recompute",
        "let the checkpoint's policy save it (MUST_SAVE or PREFER_SAVE), or leave it out of the "
        "checkpoint",
    ),
    (
        r"not linear in|reads a large gradient",
        "a gradient of the wide value is changed on its way; clip or scale the loss instead",
    ),
    (r"torch's own budget", "leave it out, and give mstpass the option memory_budget"),
    (
        r"has shape|the loop returns|need their own results|no node holds the size"
        r"|^\w*(Error|Exception)",
        _REPORT,
    ),
)


def is_output(reason: str) -> bool:
    """Whether a part is refused as the graph returns something of it."""
    return re.search(_OUTPUT, reason) is not None


def fix_of(reason: str) -> str:
    """What to change; empty where nothing is known to help."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, reason)), "")


def with_fix(rejection: Rejection) -> Rejection:
    return dataclasses.replace(rejection, fix=rejection.fix or fix_of(rejection.reason))
