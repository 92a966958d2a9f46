"""What a user can do about a refusal: the advice of each reason.

A reason is made where something is refused, often deep in the token rule of an op, and names what
stands in the way there. The advice, in the user's terms, is the same for many reasons: called with
the text of a reason, it gives the reason. A test checks that every reason in the sources has some.
"""

from __future__ import annotations


class Reason(str):
    """Why something is refused, with what the user can do about it."""

    advice: str

    def __new__(cls, text: str, advice: str = "") -> Reason:
        reason = super().__new__(cls, text)
        reason.advice = advice
        return reason

    def of(self, *given: object) -> Reason:
        """The same, with what is given in the places of ``{}``."""
        return Reason(self.format(*given), self.advice)


class Advice(str):
    """What a user can do."""

    def __call__(self, text: str) -> Reason:
        return Reason(text, self)


_NOTHING = "change nothing"  # how advice begins that asks for nothing


def _nothing(why: str) -> Advice:
    return Advice(f"{_NOTHING}{why}")


# ---- the tokens ----------------------------------------------------------------------------------
ROWWISE = Advice(
    "work token by token on the wide value, or take sums, means, maxima or softmax over all "
    "tokens: compute what else mixes tokens, such as sorting, on the narrow input, or on the "
    "losses of the tokens"
)
NO_STACKS = Advice(
    "do not stack or join wide values, such as the logits of several heads: compute each one's "
    "loss by itself, and add the losses"
)
SELECT_FIRST = Advice(
    "select tokens before the widening matmul: `head(h[:, -1])` instead of `head(h)[:, -1]`; to "
    "leave tokens out of a loss, use `ignore_index`, or one mask for hidden states and labels"
)
SEPARATE_DIMS = Advice(
    "keep tokens and features in separate dims: flatten batch and sequence together, and nothing "
    "else with them; do not flatten stacked heads with the tokens, but add the losses of each"
)
MORE_ROWS = Advice(
    "give this product more rows at once, by a larger batch or longer sequences where these "
    "make its rows, or force a chunk length with chunk_tokens; if the step splits its tokens or "
    "logits by hand, do not: mst makes the chunks"
)
SMALLER_CHUNKS = Advice("set a smaller chunk_tokens, or leave it out")
DIVIDING_CHUNKS = Advice(
    "pad to a multiple of chunk_tokens, set one that divides the tokens, or leave it out"
)
STATIC_SIZE = Advice(
    "make that size static: hold the weights in a module, or call "
    "torch._dynamo.mark_static(tensor, dim)"
)
FEWER_SUMS = Advice("take fewer of them, one after the other: fewer iterations")

# ---- ops -----------------------------------------------------------------------------------------
EXTREMA = Advice("take amin or amax in place of the values of min and max")
NARROW_OR_OTHER_OP = Advice(
    "mstpass does not know how this op treats tokens: apply it to narrow values (before the "
    "widening matmul or after the loss), or write it with other ops; please report it"
)
IN_ATEN = Advice(
    "write the op with ATen ops (plain torch, no custom or opaque op), or apply it to narrow "
    "values: before the widening matmul or after the loss"
)
NARROW_EXCHANGE = Advice(
    f"{_NOTHING} where queries, keys and values are exchanged; elsewhere exchange narrow "
    "values: the input of the widening matmul, or what is reduced token by token"
)
NO_DROPOUT = Advice(
    "move dropout to narrow values, or set p=0: a chunk cannot draw only its own part of the "
    "random numbers"
)
NO_WRITES = Advice(
    "write to a buffer what is reduced token by token, `buffer.copy_(logits.amax(-1))`, or "
    "write outside of the compiled step; let an op of your own return its result"
)
RESIZE_FEATURES = Advice(
    "resize or pool the features in front of the head, not the logits: unless that takes a "
    "maximum, both are the same for a linear head"
)
NEEDS_ALL = _nothing(": attention and convolutions need all tokens of their input at once")
ONLY_DENSE = _nothing(": of MLPs, only dense ones run in chunks so far")
LINEAR = Advice(
    "clip or scale the loss instead: here the gradient of a wide value is changed on its way"
)
ORDINARY = Advice("let the wide values be dense, and resolve_conj() or resolve_neg()")

# ---- attention -----------------------------------------------------------------------------------
NO_MASK = Advice(
    "where nothing is padded, pass no attention mask (padding on the right needs none under causal "
    "attention, if the loss ignores it); for packed sequences, windows and blocks use "
    "FlexAttention, or flash attention with sequence lengths (varlen)"
)
NO_MASK_OR_BUDGET = Advice(
    f"{NO_MASK}; a (lower) memory_budget takes its rows by loops, if the graph has it"
)
FLAG_OF_KERNEL = _nothing(
    "; attention that builds no mask is leaner: FlexAttention, or on a GPU flash "
    "attention in 16 bits, which has a causal flag and a window"
)
ALIKE_HEADS = Advice("where all heads may do alike, let score_mod and mask_mod not use the head")
NO_TRAINED_SCORES = Advice("give score_mod what is not trained, or detach it")
NO_ATTENTION_DROPOUT = Advice(
    "apply dropout to the result of attention, or set attention's probability of it to 0"
)
DIVIDING_HEADS = _nothing(
    ": attention runs in groups of heads only if its heads divide into groups"
)
HEADS_APART = Advice(
    "keep heads apart between the projections and attention: in a dim of their own, and norms, "
    "slices and softmax over the features of one head"
)
OWN_LOOPS = _nothing(": its attention and its MLP may run in loops of their own")

# ---- what leaves a region ------------------------------------------------------------------------
RETURN_LOSS = Advice(
    "compile a function that computes the loss itself and returns only the loss, such as "
    "`lambda batch: model(**batch).loss`; if nobody reads logits that are returned beside "
    "their loss, set options={'logits': 'drop'}, as mstpass.compile(model) does"
)
RETURN_MADE = Advice("return what you compute from the value instead, or do not return it")
RETURN_SUM = Advice("return the sum or the mean over tokens instead, or do not return it")
LOSS_IN_GRAPH = Advice(
    "compute the logits in the same compiled function as the loss; where DDP or FSDP2 wraps "
    "the model, in the module that it wraps"
)
ONE_GRAPH = Advice(
    "compile a function that computes the loss itself and returns only the loss; or remove the "
    "graph break (TORCH_LOGS=graph_breaks), and pad to sizes that do not depend on data"
)
NO_DDP_SPLITS = Advice("set torch._dynamo.config.optimize_ddp = False")
LOGITS_AS_MADE = Advice(
    "return the logits as the head makes them, or do not return what is made from them"
)
USE_RESULTS = Advice("return a loss that depends on the results, or leave the computation out")
NARROW_READER = Advice(
    "that line reads the wide value itself: let it read a value that is reduced token by "
    "token, such as an argmax or a log-probability, or move it out of the step"
)
OTHER_REGION = _nothing(": its readers already run in chunks, with another region")
OWN_VALUES = Advice(
    "give each widening matmul values of its own: two of them share what is computed here"
)

# ---- chunks are possible but gain nothing --------------------------------------------------------
EQUAL_TOKENS = _nothing(
    "; or compute this part for one token and expand it: all tokens are equal here"
)
AS_MUCH_MEMORY = _nothing(": a part of all tokens is kept in any case")
MORE_ROWS_LOWER = _nothing(": with more rows at once, chunks lower the peak")
LEAST_BUDGET = _nothing(": no budget is lower")
LOWER_BUDGET = _nothing(
    "; to get chunks here anyway, set a lower memory_budget, or force them with chunk_tokens"
)
ONLY_WIDENS = _nothing(
    ": a matmul that only widens, such as the fused QKV projection of attention, "
    "has no large values between its input and its result"
)
_SET_BUDGET = "set a memory_budget (0.0 is the least memory)"
SET_BUDGET = Advice(f"{_SET_BUDGET}, or a larger free_overhead")

# ---- checkpoints, budgets, and what no user can change -------------------------------------------
MAY_SAVE = Advice(
    "let the checkpoint's policy save the value (MUST_SAVE or PREFER_SAVE), or move it out of "
    "the checkpoint"
)
NO_COMPILED_AUTOGRAD = Advice(
    "leave compiled autograd off for this step (torch._dynamo.config.compiled_autograd); heads "
    "with a scalar loss run in chunks in any case"
)
OUR_BUDGET = Advice("remove that budget, and set the option memory_budget of mstpass")
REPORT = Advice(
    "this is a limit of mstpass, not of your code: please report it with the error that "
    "options={'strict': True} raises"
)


def fix_of(reason: str) -> str:
    """What the user can do about a reason; empty if nothing is known to help."""
    return reason.advice if isinstance(reason, Reason) else ""


def is_output(reason: str) -> bool:
    """Whether something was refused because the graph returns a part of it."""
    return any(advice in fix_of(reason) for advice in (RETURN_LOSS, RETURN_MADE, RETURN_SUM))


def asks_for_nothing(fix: str) -> bool:
    """Whether advice is to change nothing."""
    return fix.startswith(_NOTHING)


def under_a_budget(reason: str, more: str) -> Reason:
    """The reason of a plan without a budget; ``more``: what it may be under one."""
    fix = fix_of(reason)
    others = "" if asks_for_nothing(fix) else f"; or {fix}"
    return Reason(f"{reason}; under a memory_budget {more}", f"{_SET_BUDGET}{others}")
