"""What a user can do about a refusal: one table from reasons to advice.

A reason is made where something is refused, often deep in the token rule of an op, and names what
stands in the way there. The advice, in the user's terms, is the same for many reasons. The first
pattern of the table that is found in a reason gives its advice. A test checks that every reason in
the sources finds some.
"""

from __future__ import annotations

import dataclasses
import re

from mstpass.plans import Rejection

_ROWWISE = (
    "work token by token on the wide value, or take sums, means, maxima or softmax over all "
    "tokens: compute what else mixes tokens, such as sorting, on the narrow input, or on the "
    "losses of the tokens"
)
_STACKS = (
    "do not stack or join wide values, such as the logits of several heads: compute each one's "
    "loss by itself, and add the losses"
)
_CHUNKS_BY_HAND = "; if the step splits its tokens or logits by hand, do not: mst makes the chunks"
_SELECT_FIRST = (
    "select tokens before the widening matmul: `head(h[:, -1])` instead of `head(h)[:, -1]`; to "
    "leave tokens out of a loss, use `ignore_index`, or one mask for hidden states and labels"
)
_SEPARATE_DIMS = (
    "keep tokens and features in separate dims: flatten batch and sequence together, and nothing "
    "else with them; do not flatten stacked heads with the tokens, but add the losses of each"
)
_REPORT = (
    "this is a limit of mstpass, not of your code: please report it with the error that "
    "options={'strict': True} raises"
)
_NOTHING = "change nothing"  # how advice begins that asks for nothing
_BUDGET = (
    f"{_NOTHING}; to get chunks here anyway, set a lower memory_budget, or force them with "
    "chunk_tokens"
)
_SET_BUDGET = "set a memory_budget (0.0 is the least memory)"
TOO_LONG = "take too long without a budget"
UNDER_BUDGET = "; under a memory_budget"  # a reason goes on so

_MASK = (
    "where nothing is padded, pass no attention mask (padding on the right needs none under causal "
    "attention, if the loss ignores it); for packed sequences, windows and blocks use "
    "FlexAttention, or flash attention with sequence lengths (varlen)"
)
_MASK_BY_BUDGET = f"{_MASK}; a (lower) memory_budget takes its rows by loops, if the graph has it"

_TOO_FEW_TOKENS = r"fewer than two chunks|too few for a loop"
_OUTPUT = r"(are|is) an output( of the graph)?"

_ADVICE = (
    # ---- masks of attention
    (r"attention reads this mask whole", _MASK_BY_BUDGET),
    (
        r"is an input of the graph|pads its rows|a row for each query|that is not by row"
        r"|needs its rows in another dim",
        _MASK,
    ),
    # ---- the step returns a wide value
    (
        r"keeps the logits .*(graph break|depends on data)",
        "compile a function that computes the loss itself and returns only the loss; or remove the "
        "graph break (TORCH_LOGS=graph_breaks), and pad to sizes that do not depend on data",
    ),
    (r"keeps the logits .*DDP splits", "set torch._dynamo.config.optimize_ddp = False"),
    (
        r"keeps the logits",
        "return the logits as the head makes them, or do not return what is made from them",
    ),
    (
        r"logits are an output of the graph",
        "compile a function that computes the loss itself and returns only the loss, such as "
        "`lambda batch: model(**batch).loss`; if nobody reads logits that are returned beside "
        "their loss, set options={'logits': 'drop'}, as mstpass.compile(model) does",
    ),
    (
        r"logits are an input of the graph",
        "compute the logits in the same compiled function as the loss; where DDP or FSDP2 wraps "
        "the model, in the module that it wraps",
    ),
    (
        r"large value is an output",
        "return what you compute from the value instead, or do not return it",
    ),
    (_OUTPUT, "return the sum or the mean over tokens instead, or do not return it"),
    (r"is no ordinary tensor", "let the wide values be dense, and resolve_conj() or resolve_neg()"),
    # ---- masks
    (
        r"^the mask('s form)? is",
        f"{_NOTHING}; attention that builds no mask is leaner: FlexAttention, or on a GPU flash "
        "attention in 16 bits, which has a causal flag and a window",
    ),
    # ---- the batch
    (
        r"has a symbolic size",
        "make that size static: hold the weights in a module, or call "
        "torch._dynamo.mark_static(tensor, dim)",
    ),
    (r"fit in one chunk of chunk_tokens", "set a smaller chunk_tokens, or leave it out"),
    (
        _TOO_FEW_TOKENS,
        "give this product more rows at once, by a larger batch or longer sequences where these "
        "make its rows, or force a chunk length with chunk_tokens" + _CHUNKS_BY_HAND,
    ),
    # ---- chunks are possible but gain nothing
    (
        r"read constants only",
        f"{_NOTHING}; or compute this part for one token and expand it: all tokens are equal here",
    ),
    (r"would hold as much memory", f"{_NOTHING}: a part of all tokens is kept in any case"),
    (r"would raise the step's peak", f"{_NOTHING}: with more rows at once, chunks lower the peak"),
    (TOO_LONG, f"{_SET_BUDGET}, or a larger free_overhead"),
    (r"budget is met without them", _BUDGET),
    (r"at the least memory that was found", f"{_NOTHING}: no budget is lower"),
    (r"peak lies elsewhere|gains nothing|chunks without recomputation", _BUDGET),
    (
        r"chunks would save no memory",
        f"{_NOTHING}: a matmul that only widens, such as the fused QKV projection of attention, "
        "has no large values between its input and its result",
    ),
    (
        r"nothing outside the region uses",
        "return a loss that depends on the results, or leave the computation out",
    ),
    (r"more than \d+: each value", "take fewer of them, one after the other: fewer iterations"),
    (r"aten\.(min|max)\.dim reduces", "take amin or amax in place of the values of min and max"),
    # ---- what happens to the wide values
    (
        r"outside the region, reads a wide value",
        "that line reads the wide value itself: let it read a value that is reduced token by "
        "token, such as an argmax or a log-probability, or move it out of the step",
    ),
    (
        r"token rule for (aten|prims)\.",
        "mstpass does not know how this op treats tokens: apply it to narrow values (before the "
        "widening matmul or after the loss), or write it with other ops; please report it",
    ),
    (
        r"token rule for",
        "write the op with ATen ops (plain torch, no custom or opaque op), or apply it to narrow "
        "values: before the widening matmul or after the loss",
    ),
    (
        r"in step with the other ranks|with other ranks",
        "change nothing where queries, keys and values are exchanged; elsewhere exchange narrow "
        "values: the input of the widening matmul, or what is reduced token by token",
    ),
    (
        r"draws (random numbers|a random seed)",
        "move dropout to narrow values, or set p=0: a chunk cannot draw only its own part of the "
        "random numbers",
    ),
    (
        r"writes to its operands",
        "write to a buffer what is reduced token by token, `buffer.copy_(logits.amax(-1))`, or "
        "write outside of the compiled step; let an op of your own return its result",
    ),
    (
        r"scores or masks depend on the head",
        "where all heads may do alike, let score_mod and mask_mod not use the head",
    ),
    (
        r"gradients of what its scores are changed by",
        "give score_mod what is not trained, or detach it",
    ),
    (
        r"do not divide into chunks of \d+ queries",
        "pad to a multiple of chunk_tokens, set one that divides the tokens, or leave it out",
    ),
    (
        r"\bblocks?\b|residual sum|before the next attention|chunk of queries|chunks of queries"
        r"|other tokens than those of the keys",
        f"{_NOTHING}: its attention and its MLP may run in loops of their own",
    ),
    (
        r"dropout in attention",
        "apply dropout to the result of attention, or set attention's probability of it to 0",
    ),
    (
        r"key-value heads",
        f"{_NOTHING}: attention runs in groups of heads only if its heads divide into groups",
    ),
    (
        r"\bheads\b|every head|read along several dims",
        "keep heads apart between the projections and attention: in a dim of their own, and norms, "
        "slices and softmax over the features of one head",
    ),
    (
        r"_unsafe_index|pools neighbouring",
        "resize or pool the features in front of the head, not the logits: unless that takes a "
        "maximum, both are the same for a linear head",
    ),
    (
        r"attention|neighbouring positions",
        f"{_NOTHING}: attention and convolutions need all tokens of their input at once",
    ),
    (r"grouped by expert", f"{_NOTHING}: of MLPs, only dense ones run in chunks so far"),
    (r"size (of .*)?depends on data", _SELECT_FIRST),
    (
        r"picks (single )?tokens|writes single tokens|writes at indices|adds rows at indices"
        r"|indexed dims",
        _SELECT_FIRST,
    ),
    (r"aten\.(stack|cat)\b.*", _STACKS),
    (
        r"reduce[sd] over|along (a|the) token dim|normalizes over tokens|over all elements"
        r"|whole tensors|sum over all tokens|without dims|no operand that it sums"
        r"|scales that all tokens decide"
        r"|sums over the tokens|itself|two roles|bias and as factor|depend on tokens"
        r"|features of an embedding",
        _ROWWISE,
    ),
    (
        r"token dims|tokens in several dims|not by dims|an operand of .* is not a tensor"
        r"|several tensors|not one tensor",
        _SEPARATE_DIMS,
    ),
    (
        r"already belongs to another region",
        f"{_NOTHING}: its readers already run in chunks, with another region",
    ),
    (
        r"path that leaves the region",
        "give each widening matmul values of its own: two of them share what is computed here",
    ),
    # ---- checkpoints, gradients, budgets
    (
        r"must_recompute",
        "let the checkpoint's policy save the value (MUST_SAVE or PREFER_SAVE), or move it out of "
        "the checkpoint",
    ),
    (
        r"not linear in",
        "clip or scale the loss instead: here the gradient of a wide value is changed on its way",
    ),
    (
        r"compiled autograd traces",
        "leave compiled autograd off for this step (torch._dynamo.config.compiled_autograd); heads "
        "with a scalar loss run in chunks in any case",
    ),
    (r"torch's own budget", "remove that budget, and set the option memory_budget of mstpass"),
    # ---- what no user can change
    (
        r"has shape|the loop returns|made from their own results|no node holds the size"
        r"|^([\w.]+:\d+: )?\w*(Error|Exception)|is refused: ",
        _REPORT,
    ),
)


def is_output(reason: str) -> bool:
    """Whether something was refused because the graph returns a part of it."""
    return re.search(_OUTPUT, reason) is not None


def asks_for_nothing(rejection: Rejection) -> bool:
    """Whether the advice is to change nothing."""
    return rejection.fix.startswith(_NOTHING)


def wants_more_tokens(rejection: Rejection) -> bool:
    """Whether the part would run in chunks if the step had more tokens."""
    return re.search(_TOO_FEW_TOKENS, rejection.reason) is not None


def under_a_budget(rejection: Rejection) -> Rejection:
    """A rejection of a plan without a budget, under which the part has loops."""
    reason = f"{rejection.reason}{UNDER_BUDGET} it may run in chunks"
    return dataclasses.replace(rejection, reason=reason)


def fix_of(reason: str) -> str:
    """What the user can do about a reason; empty if nothing is known to help."""
    reason, by_budget, _ = reason.partition(UNDER_BUDGET)
    found = next((advice for pattern, advice in _ADVICE if re.search(pattern, reason)), "")
    others = "" if found.startswith(_NOTHING) else f"; or {found}"
    return f"{_SET_BUDGET}{others}" if by_budget else found


def with_fix(rejection: Rejection) -> Rejection:
    """The rejection with its advice; advice that it has already stays."""
    return dataclasses.replace(rejection, fix=rejection.fix or fix_of(rejection.reason))
