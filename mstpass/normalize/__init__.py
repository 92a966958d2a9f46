"""Rewrite the joint graph to a form in which more regions are found, with the same results.

The passes are ``READ``, ``SIZES``, ``TOKENS``, ``FOR_SECTIONS``, ``HEADS`` and ``ROWS``, in their
order:

sizes_from_inputs      symbolic sizes come from the inputs of the step
assertions_of_sizes    assertions about sizes that depend on data are left to Inductor
scattered_constants    scattered constants have their own dtype
convolutions_as_products  a convolution of one element becomes a product over channels
items_as_slices        items of a split or an unbind become slices and selections
unstack                stacked wide values are computed part by part
index_by_token         indexing with the tokens' numbers becomes a gather or a scatter
local_sums             a softmax over shards sums before it knows the maximum of all shards
variances_as_sums      a variance over tokens becomes a sum of squares
means_as_sums          a mean over tokens becomes a sum, divided by their number
selections_as_rows     a selection by a mask, or by several indices, has the numbers of its rows
move_slices            a slice or a selection of tokens moves from the result of a matmul to its
                       operand
join_windows           windows of a wide value are worked on together, on all tokens; and so are
                       products of windows of a narrow one; so a slice for an accuracy moves
                       from the logits to their argmax
expand_to_tokens       an operand with one row per sequence gets one row per token
scattered_gradients_as_choices  a scatter of few elements per row becomes choices
gathers_as_sums        a gather of one token for each feature becomes a sum over tokens
values_by_axis         values that are read along two axes are computed once for each
grouped_by_chunk       products of experts are told which rows a chunk has
row_sums_of_gradients  sums of gradients over the vocabulary become sums that the forward knows
products_by_section    a product that projects queries, keys and values at once becomes three
bias_after_product     the bias of attention's output is added after its product
unused_random_state    attention without dropout is given no state of a random generator
expand_to_rows         expand_to_tokens, of the rows of attention
gradients_in_parts     a norm's gradient by the keys, apart from that by the queries

Three more are applied before, to every graph: ordinary_tensors (zeros without memory become tensors
that a loop can read), inputs_before_writes and masks_as_flags, by which a mask of attention that
follows from positions becomes a flag of its kernel (masks_as_flags.py). Those that compute values
for other tokens than the graph does share one evaluator (partial.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container

from mstpass.graph.joint import JointGraph
from mstpass.graph.rewriting import Rewritten
from mstpass.normalize import (
    for_heads,
    indexing,
    join_windows,
    move_token_slices,
    operands,
    plain_values,
    products,
    sums_over_tokens,
    unstack,
)
from mstpass.normalize.masks_as_flags import WithoutMasks, masks_as_flags
from mstpass.passes.runner import Pass, PassRunner


def _pass(run: Callable[[JointGraph], Rewritten]) -> Pass:
    return Pass(run.__name__, run)


def _masks_as_flags(joint: JointGraph) -> tuple[JointGraph, WithoutMasks]:
    found = masks_as_flags(joint)
    return found.joint, found


MASKS = Pass("masks_as_flags", _masks_as_flags)
READ = (  # of every graph
    _pass(plain_values.ordinary_tensors),
    dataclasses.replace(
        _pass(plain_values.inputs_before_writes), required=plain_values.overwritten_inputs
    ),
)
SIZES = (  # of every graph with regions
    _pass(plain_values.sizes_from_inputs),
    _pass(plain_values.assertions_of_sizes),
    _pass(plain_values.scattered_constants),
)
JOIN_PRODUCTS = _pass(join_windows.join_products)
CONVOLUTIONS = _pass(products.convolutions_as_products)
TOKENS = (  # where a region needs one
    CONVOLUTIONS,
    _pass(indexing.items_as_slices),
    _pass(unstack.unstack),
    _pass(indexing.index_by_token),
    _pass(sums_over_tokens.local_sums),
    _pass(sums_over_tokens.variances_as_sums),
    _pass(sums_over_tokens.means_as_sums),
    _pass(indexing.selections_as_rows),
    _pass(move_token_slices.move_slices),
    _pass(indexing.items_as_slices),
    JOIN_PRODUCTS,
    _pass(join_windows.join_windows),
    _pass(operands.expand_to_tokens),
    _pass(sums_over_tokens.scattered_gradients_as_choices),
    _pass(sums_over_tokens.gathers_as_sums),
    _pass(operands.values_by_axis),
    _pass(products.grouped_by_chunk),
)
FOR_SECTIONS = (
    _pass(sums_over_tokens.row_sums_of_gradients),
)  # where a budget asks for loops over sections
HEADS = (  # where loops may run over heads
    _pass(for_heads.products_by_section),
    _pass(for_heads.bias_after_product),
    _pass(for_heads.unused_random_state),
)


ROWS = (  # where loops may run over the rows of attention
    _pass(operands.expand_to_rows),
    _pass(for_heads.gradients_in_parts),
)


def normalized(
    joint: JointGraph,
    for_heads: bool = False,
    runner: PassRunner | None = None,
    kept: Container[str] = (),
    for_blocks: bool = False,
) -> tuple[JointGraph, JointGraph, frozenset[str]]:
    """Apply the rewrites to copies; ``joint`` itself stays as it is.

    Args:
        for_heads: attention may run in loops over heads, so apply what these need as well.
        kept: the names of bases of which no products are made (products.py).
        for_blocks: and over tokens through attention.

    Returns:
        The graph with its sizes taken from its inputs, and scattered constants in their dtype. The
        normalized graph, which is the first one if no further rewrite applies. The names of the
        nodes in it that the rewrites changed or made.
    """
    runner = runner or PassRunner()
    joint, _ = runner.run_all(SIZES, joint)
    steps = (*TOKENS, *(HEADS if for_heads else ()), *(ROWS if for_blocks else ()))
    left_out = lambda step: dataclasses.replace(step, run=functools.partial(step.run, kept=kept))
    makers = (CONVOLUTIONS, JOIN_PRODUCTS)
    passes = (left_out(step) if step in makers else step for step in steps)
    prepared, changed = runner.run_all(passes, joint)
    return joint, prepared, changed
