"""What the fuzzer found, each as the smallest case that showed it."""

from __future__ import annotations

import dataclasses

import pytest

from mstpass import fewer_loops
from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.checks import check_case
from mstpass.partition.solvers.candidate import TIE


def held(case: Case, kind: str = "fast") -> None:
    checked = check_case(case, kind)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))


def test_torch_finds_a_cut_where_one_result_of_a_loop_is_recomputed() -> None:
    """A policy that saves products, around an MLP, in a graph that torch's partitioner splits.

    The loop's item had the tag of the value that it stands for, the loop had none.
    """
    mlp = Layer(
        norm="layer_plain", residual="add", variant=3, act="square_relu", checkpoint="save_products"
    )
    held(Case((mlp,), mutations=("input_counter",), chunk_tokens=3, length=64))


def test_gradients_that_several_ops_read_are_defined_before_all_of_them() -> None:
    """A bias of logits and a z-loss, in chunks that overlap: a loop's body read a value too early.

    What depends on a side value was put in front of the reader that was made first, which need not
    be the first in the graph.
    """
    held(Case(logit_ops=("bias",), loss="z_loss", length=5, vocabulary=600, chunk_tokens=4))


@pytest.mark.full
def test_a_batch_shorter_than_a_chunk_of_symbolic_length() -> None:
    """The simulated peak counted a chunk of the greatest length, which the batch does not have."""
    held(
        Case(
            (Layer(),), loss="running_sum", dynamic="all", length=5, chunk_tokens=1000, budgets=True
        )
    )


def test_a_sum_over_rows_is_no_value_of_a_row() -> None:
    """With as many features as tokens in a chunk it was taken for one, and no other length fit."""
    mlp = Layer(variant=1, residual="add", act="hardswish", bias=True)
    case = Case(
        (mlp,),
        batch=3,
        length=256,
        features=12,
        vocabulary=499,
        dynamic="length",
        memory_budget=0.0,
        chunk_tokens=64,
        forced=False,
    )
    held(case)


def test_what_is_compared_is_reconstructed_bit_for_bit() -> None:
    """Zeros of a ReLU, from the norm behind it, were no zeros: its gradient was let through."""
    layer = Layer(kind="attention", act="relu")
    held(Case((layer,), final_norm="layer", solver="checkpoints", variants=("a fifth, tolerant",)))


def test_symbolic_sizes_are_no_buffers_that_a_kernel_reads() -> None:
    """The rewritten graph's simulated peak was above that of its plan, which has no sizes."""
    head = Case(head="low_rank", logit_ops=("center",), shift="first", loss="num_items")
    held(
        dataclasses.replace(
            head, checkpoint="all", length=64, features=8, vocabulary=97, dynamic="batch"
        )
    )


def test_symbolic_sizes_that_cross_are_no_buffers_in_a_plan_either() -> None:
    """They were inputs of a plan's backward, which then had another kernel than its graph."""
    sums = Case((), source="ids", logit_ops=("mean_of_all",), loss="smoothing", length=13)
    held(dataclasses.replace(sums, dynamic="length", chunk_tokens=32, forced=False))


@pytest.mark.full
def test_the_least_memory_may_lie_between_two_plans() -> None:
    experts = Layer(kind="experts", variant=4, norm="layer_plain", residual="sandwich")
    layers = tuple(
        dataclasses.replace(layer, act="hardswish", width=48)
        for layer in (Layer(variant=5, norm="layer_plain", residual="parallel", bias=True), experts)
    )
    case = Case(
        layers,
        source="ids",
        final_norm="layer_plain",
        head="frozen",
        logit_ops=("last_token",),
        shift="last",
        loss="class_weights",
        batch=4,
        length=5,
        memory_budget="free",
        chunk_tokens=3,
        budgets=True,
    )
    held(case)


@pytest.mark.full
def test_batched_products_of_symbolic_length_under_inductor() -> None:
    """Inductor asks of a ``bmm`` on the CPU whether it has one row, which a loop cannot tell."""
    experts = Layer(kind="experts", variant=4, norm="group", act="softmax", width=96)
    case = Case(
        (experts,),
        logit_ops=("center",),
        loss="log_probabilities",
        batch=7,
        length=13,
        dynamic="all",
        memory_budget=0.5,
        chunk_tokens=3,
    )
    held(case, "inductor")


@pytest.mark.full
def test_a_value_recomputed_from_a_reconstructed_one_keeps_its_policy() -> None:
    """Only a checkpoint's policy lets backward sort again; the copy of the sort had lost it."""
    layers = (
        Layer(variant=7),
        Layer(kind="experts", variant=5, width=48, dropout=0.5),
        Layer(kind="experts", variant=3, checkpoint="save_attention"),
    )
    case = Case(
        layers,
        loss="mse",
        batch=1,
        length=96,
        features=24,
        vocabulary=499,
        chunk_tokens=100,
        forced=False,
        reconstruct="tolerant",
        variants=("half",),
    )
    held(case)


@pytest.mark.full
def test_a_gradient_of_labels_alone_has_no_buffer() -> None:
    """Recomputation waited for it, so that it was written: the peak was half above Inductor's."""
    experts = Layer(kind="experts", variant=5, norm="layer_plain", act="sigmoid", width=37)
    case = Case(
        (experts,),
        logit_ops=("hide_words", "bias"),
        shift="logits",
        checkpoint="all",
        batch=3,
        length=131,
        features=12,
        vocabulary=499,
        autocast=True,
        forced=False,
    )
    held(case, "inductor")


@pytest.mark.full
def test_an_iteration_s_rows_have_a_symbolic_count() -> None:
    """Experts as batched products: a result had the generic size of a batch in its shape."""
    experts = Layer(kind="experts", variant=13, act="softplus")
    held(Case((experts,), dynamic="batch", variants=("half",)))


@pytest.mark.full
def test_loops_read_values_with_the_strides_that_were_traced() -> None:
    """A norm over groups has others where ops run one by one; Inductor keeps to the traced ones."""
    gated = Layer(residual="gated", act="gelu")
    held(Case((gated,), final_norm="group", batch=1, dynamic="all", lowered=True))


def test_a_view_of_what_a_loop_over_heads_returns_may_copy() -> None:
    """The result's heads come first in memory, so the view was none where ops run one by one."""
    attention = Layer(kind="attention", bias=True, ops=("sort_features",))
    held(Case((attention,), variants=("over heads",)))


@pytest.mark.full
def test_slices_behind_gradients_of_the_same_tokens() -> None:
    """The derivative of an activation slices a value that a gradient before it has read as well.

    All slices were moved before any gradient, so that what they share was put behind its reader.
    """
    gated = Layer(variant=1, act="silu", width=48)
    case = Case((Layer("scan", variant=1), gated), shift="logits", batch=1, dynamic="length")
    held(dataclasses.replace(case, features=12, vocabulary=128))


@pytest.mark.full
def test_features_of_symbolic_size_behind_a_slice() -> None:
    """Weights of tokens by tokens have as many features as tokens: a size that is symbolic."""
    held(Case((Layer("scan", variant=1),), shift="logits", batch=1, dynamic="length"))


def test_a_program_may_magnify_rounding() -> None:
    """A running sum of centred values ends at zero but for rounding, and is divided by its norm.

    Its gradients change by 1e-7 where the inputs change in their last bit.
    """
    scan = Layer("scan", ops=("center",), bias=True)
    held(Case((scan,), final_norm="unit", batch=1, length=64, variants=("checkpoints",)))


@pytest.mark.full
def test_scatters_that_never_wait_count_alike_under_any_budget() -> None:
    """The same graphs had a higher simulated peak under a budget than under the free plan."""
    case = Case(head="norm_after", logit_ops=("hide_words",), loss="preference", budgets=True)
    held(dataclasses.replace(case, batch=1, length=64, features=8, vocabulary=50))


@pytest.mark.full
def test_each_loop_that_is_asked_for_and_raises_the_peak_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only all of them together were compared with the step without loops, not each."""
    monkeypatch.setattr(fewer_loops, "FORCED_MAY_RAISE", TIE)  # as outside of the tests
    layers = (Layer(), Layer(variant=1, residual="gated", width=96))
    case = Case(
        layers,
        logit_ops=("cap",),
        extras=("logits", "hidden_view", "accuracy"),
        batch=1,
        length=256,
        vocabulary=600,
        chunk_tokens=100,
        forced=False,
        budgets=True,
    )
    held(case)


@pytest.mark.full
def test_a_value_recomputed_in_a_pass_of_its_own_is_written_once() -> None:
    """The rewritten graph counted it twice, and its plan as a call, which ends a C++ function."""
    held(
        Case(
            source="ids",
            final_norm="rms",
            shift="every_other",
            loss="top_margin",
            length=31,
            budgets=True,
        )
    )


def test_a_difference_of_rounded_numbers_is_no_reconstruction() -> None:
    """Of logits that are nearly zero: their logarithms, -6, were known to bfloat16's digits only.

    An inverse that magnifies errors read a value that a cast's inverse had given.
    """
    case = Case(source="hidden", logit_ops=("token_softmax",), loss="per_token", length=256)
    case = dataclasses.replace(case, features=16, vocabulary=499, dtype="bfloat16")
    held(dataclasses.replace(case, solver="knapsack", reconstruct="tolerant", chunk_tokens=64))


@pytest.mark.full
def test_sizes_of_two_inputs_that_turn_out_equal_under_inductor() -> None:
    """Inductor knew the length by one input's name for it, the loop's body by the other's."""
    case = Case(mutations=("input_scaled",), dynamic="both", batch=3, length=64, chunk_tokens=4)
    held(case, "inductor")


@pytest.mark.full
def test_scores_of_symbolic_batch_and_length_fit_into_64_bits() -> None:
    """At the generic point a batch was a multiple of the length, and both were far above 2^16."""
    attention = Layer(kind="attention", variant=5, residual="add")
    case = Case((attention,), shift="labels", batch=7, length=64, vocabulary=128, dynamic="both")
    held(dataclasses.replace(case, chunk_tokens=1000, variants=("over heads",)))


@pytest.mark.full
def test_a_padded_gradient_is_computed_twice_as_its_plan_says() -> None:
    """Plans counted on copies of slices' gradients, the finished backward made none of them."""
    scan = Layer("scan", 4, norm="group", residual="post", act="relu_in_place", width=48)
    case = Case((scan,), source="two", final_norm="group", head="tied", shift="first", length=31)
    held(dataclasses.replace(case, features=24, memory_budget=0.2, chunk_tokens=4, budgets=True))


def test_a_sunk_slice_stays_where_it_is() -> None:
    """The slice of the narrow value was sunk again, and the slice of what is made from that."""
    mlp = Layer(variant=5, ops=("token_softmax",), act="sigmoid", width=24)
    case = Case((mlp,), shift="first", loss="sine_sum", batch=7, dynamic="batch", head="by_hand")
    held(dataclasses.replace(case, features=12, vocabulary=600, chunk_tokens=3))


@pytest.mark.full
def test_a_value_whose_recorded_type_is_not_that_of_its_op() -> None:
    """Inductor's joint passes leave one behind a softmax in bfloat16; nothing is reconstructed."""
    convolution = Layer(
        kind="convolution", variant=9, norm="layer", residual="parallel", act="leaky_relu"
    )
    held(
        Case(
            (Layer(norm="unit", act="relu"), convolution),
            head="norm_after",
            logit_ops=("detached_max", "scale"),
            loss="focal",
            batch=3,
            length=8,
            features=8,
            vocabulary=50,
            dtype="bfloat16",
            dynamic="batch",
            solver="knapsack",
        )
    )


@pytest.mark.full
def test_a_written_operand_keeps_the_gaps_of_its_slice() -> None:
    """Run op by op, a loop read behind the end of the operand, whose copy was dense."""
    case = Case((Layer(),), final_norm="group", shift="hidden", batch=1, length=256)
    held(dataclasses.replace(case, chunk_tokens=64, lowered=True))


@pytest.mark.full
def test_the_least_memory_may_be_far_below_the_peak_before_cheap_values_run_twice() -> None:
    """A plan that such copies lower by a third was left out for the budget 0.0, but not for 0.2."""
    mlp = Layer(
        variant=6, norm="unit", residual="none", act="relu", width=37, bias=True, dropout=0.5
    )
    case = Case(
        (dataclasses.replace(mlp, ops=("strided",)),),
        final_norm="layer_plain",
        logit_ops=("cap",),
        loss="policy_gradient",
        extras=("hidden",),
        frozen="biases",
        batch=3,
        length=13,
        features=12,
        vocabulary=50,
        chunk_tokens=1,
        budgets=True,
    )
    held(case)


def test_statistics_that_two_loops_compute_are_returned_by_one_of_them() -> None:
    """Heads of the same rows, in sections: a result of one loop took the place of another's."""
    case = Case(
        (Layer(norm="layer_plain"),),
        final_norm="layer_plain",
        shift="every_other",
        loss="stack",
        batch=1,
        length=13,
        features=8,
        vocabulary=601,
        memory_budget=0.0,
        chunk_tokens=1000,
        variants=("recompute all",),
    )
    held(case)


def test_the_lowest_plan_is_known_however_far_copies_lower_it() -> None:
    """Of plans with equal peaks the fastest was taken, and the lowest was none of them."""
    case = Case(
        (Layer(variant=10, norm="unit", residual="parallel", act="sigmoid"),),
        final_norm="layer",
        logit_ops=("alternate_softmax", "temperature"),
        shift="views",
        loss="contrastive",
        frozen="head",
        checkpoint="all",
        batch=7,
        length=64,
        features=12,
        vocabulary=50,
        autocast=True,
        memory_budget=0.0,
        chunk_tokens=4,
        chunk="blocks",
        variants=("chunks of 5, least memory",),
    )
    held(case)
