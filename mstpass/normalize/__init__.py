"""Rewrite the joint graph to a form in which more regions are found, with the same results.

The passes are ``READ``, ``SIZES``, ``TOKENS`` and ``HEADS``, in their order:

scattered_constants.py scattered constants have their own dtype
sizes_from_inputs.py   symbolic sizes come from the inputs of the step
convolutions_as_products.py  a convolution of one element becomes a product over channels
assertions_of_sizes.py assertions about sizes that depend on data are left to Inductor
items_as_slices.py     items of a split or an unbind become slices and selections
unstack.py             stacked wide values are computed part by part
index_by_token.py      indexing with the tokens' numbers becomes a gather or a scatter
local_sums.py          a softmax over shards sums before it knows the maximum of all shards
variances_as_sums.py   a variance over tokens becomes a sum of squares
means_as_sums.py       a mean over tokens becomes a sum, divided by their number
selections_as_rows.py  a selection by a mask, or by several indices, has the numbers of its rows
move_token_slices.py   a slice or a selection of tokens moves from the result of a matmul to its
                       operand
join_windows.py        windows of a wide value are worked on together, on all tokens; and so are
                       products of windows of a narrow one
sink_token_slices.py   a slice over tokens moves from a wide value to an argmax or an entropy of it
expand_to_tokens.py    an operand with one row per sequence gets one row per token
scattered_gradients_as_choices.py  a scatter of few elements per row becomes choices
gathers_as_sums.py     a gather of one token for each feature becomes a sum over tokens
values_by_axis.py      values that are read along two axes are computed once for each
grouped_by_chunk.py    products of experts are told which rows a chunk has
products_by_section.py a product that projects queries, keys and values at once becomes three
unused_random_state.py attention without dropout is given no state of a random generator
bias_after_product.py  the bias of attention's output is added after its product
row_sums_of_gradients.py  sums of gradients over the vocabulary become sums that the forward knows

Three more are applied before, to every graph: ordinary_tensors.py (zeros without memory become
tensors that a loop can read), inputs_before_writes.py and masks_as_flags.py, by which a mask of
attention that follows from positions becomes a flag of its kernel (write_attention.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from mstpass.graph.joint import JointGraph
from mstpass.graph.rewriting import Rewritten
from mstpass.normalize.assertions_of_sizes import assertions_of_sizes
from mstpass.normalize.bias_after_product import bias_after_product
from mstpass.normalize.convolutions_as_products import convolutions_as_products
from mstpass.normalize.expand_to_tokens import expand_to_rows, expand_to_tokens
from mstpass.normalize.gathers_as_sums import gathers_as_sums
from mstpass.normalize.gradients_in_parts import gradients_in_parts
from mstpass.normalize.grouped_by_chunk import grouped_by_chunk
from mstpass.normalize.index_by_token import index_by_token
from mstpass.normalize.inputs_before_writes import inputs_before_writes, overwritten_inputs
from mstpass.normalize.items_as_slices import items_as_slices
from mstpass.normalize.join_windows import join_products, join_windows
from mstpass.normalize.left_out import NOTHING, LeftOut
from mstpass.normalize.local_sums import local_sums
from mstpass.normalize.masks_as_flags import WithoutMasks, masks_as_flags
from mstpass.normalize.means_as_sums import means_as_sums
from mstpass.normalize.move_token_slices import move_slices
from mstpass.normalize.ordinary_tensors import ordinary_tensors
from mstpass.normalize.products_by_section import products_by_section
from mstpass.normalize.row_sums_of_gradients import row_sums_of_gradients
from mstpass.normalize.scattered_constants import scattered_constants
from mstpass.normalize.scattered_gradients_as_choices import scattered_gradients_as_choices
from mstpass.normalize.selections_as_rows import selections_as_rows
from mstpass.normalize.sink_token_slices import sink_slices
from mstpass.normalize.sizes_from_inputs import sizes_from_inputs
from mstpass.normalize.unstack import unstack
from mstpass.normalize.unused_random_state import unused_random_state
from mstpass.normalize.values_by_axis import values_by_axis
from mstpass.normalize.variances_as_sums import variances_as_sums
from mstpass.passes.facts import ALWAYS, NO_LOOPS
from mstpass.passes.runner import Pass, PassRunner


def _pass(run: Callable[[JointGraph], Rewritten]) -> Pass:
    return Pass(run.__name__, run, before=(NO_LOOPS,), after=(*ALWAYS, NO_LOOPS))


def _masks_as_flags(joint: JointGraph) -> tuple[JointGraph, WithoutMasks]:
    found = masks_as_flags(joint)
    return found.joint, found


MASKS = Pass("masks_as_flags", _masks_as_flags, (NO_LOOPS,), (*ALWAYS, NO_LOOPS))
READ = (  # of every graph
    _pass(ordinary_tensors),
    dataclasses.replace(_pass(inputs_before_writes), required=overwritten_inputs),
)
SIZES = (  # of every graph with regions
    _pass(sizes_from_inputs),
    _pass(assertions_of_sizes),
    _pass(scattered_constants),
)
JOIN_PRODUCTS = _pass(join_products)
CONVOLUTIONS = _pass(convolutions_as_products)
TOKENS = (  # where a region needs one
    CONVOLUTIONS,
    _pass(items_as_slices),
    _pass(unstack),
    _pass(index_by_token),
    _pass(local_sums),
    _pass(variances_as_sums),
    _pass(means_as_sums),
    _pass(selections_as_rows),
    _pass(move_slices),
    _pass(items_as_slices),
    JOIN_PRODUCTS,
    _pass(join_windows),
    _pass(sink_slices),
    _pass(expand_to_tokens),
    _pass(scattered_gradients_as_choices),
    _pass(gathers_as_sums),
    _pass(values_by_axis),
    _pass(grouped_by_chunk),
)
FOR_SECTIONS = (_pass(row_sums_of_gradients),)  # where a budget asks for loops over sections
HEADS = (  # where loops may run over heads
    _pass(products_by_section),
    _pass(bias_after_product),
    _pass(unused_random_state),
)


ROWS = (  # where loops may run over the rows of attention
    _pass(expand_to_rows),
    _pass(gradients_in_parts),
)


def normalized(
    joint: JointGraph,
    for_heads: bool = False,
    runner: PassRunner | None = None,
    left_out: LeftOut = NOTHING,
    for_blocks: bool = False,
) -> tuple[JointGraph, JointGraph, frozenset[str]]:
    """Apply the rewrites to copies; ``joint`` itself stays as it is.

    Args:
        for_heads: attention may run in loops over heads, so apply what these need as well.
        left_out: what is not rewritten.
        for_blocks: and over tokens through attention.

    Returns:
        The graph with its sizes taken from its inputs, and scattered constants in their dtype. The
        normalized graph, which is the first one if no further rewrite applies. The names of the
        nodes in it that the rewrites changed or made.
    """
    runner = runner or PassRunner()
    joint, _ = runner.run_all(SIZES, joint)
    steps = (*TOKENS, *(HEADS if for_heads else ()), *(ROWS if for_blocks else ()))
    if left_out.windows:
        steps = tuple(step for step in steps if step is not JOIN_PRODUCTS)
    kept = functools.partial(convolutions_as_products, kept=left_out.convolutions)
    others = dataclasses.replace(CONVOLUTIONS, run=kept)
    passes = (others if step is CONVOLUTIONS else step for step in steps)
    prepared, changed = runner.run_all(passes, joint)
    return joint, prepared, changed
