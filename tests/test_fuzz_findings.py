"""What the fuzzer found, each as the smallest case that showed it."""

from __future__ import annotations

from mstpass.fuzz.case import Case, Layer
from mstpass.fuzz.checks import check_case


def held(case: Case) -> None:
    checked = check_case(case)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))


def test_torch_finds_a_cut_where_one_result_of_a_loop_is_recomputed() -> None:
    """A policy that saves products, around an MLP, in a graph that torch's partitioner splits.

    The loop's item had the tag of the value that it stands for, the loop had none.
    """
    mlp = Layer(
        norm="layer_plain", residual="add", variant=3, act="square_relu", checkpoint="save_products"
    )
    held(Case((mlp,), mutations=("input_counter",), chunk_tokens=3, length=64))
