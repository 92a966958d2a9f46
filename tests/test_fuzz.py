"""The fuzzer: cases are drawn again as they were, errors are found, shrunk and made into tests."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mstpass.cli import fuzz
from mstpass.fuzz.campaign import Campaign
from mstpass.fuzz.case import KINDS, SHIFTS, Case, Layer, draw
from mstpass.fuzz.checks import FAST, INDUCTOR, check_case
from mstpass.fuzz.program import Program, References, wrong_values
from mstpass.fuzz.reduce import as_test, reduce, smaller_cases
from mstpass.fuzz.render import source
from mstpass.fuzz.templates import DOUBLED_LOSSES, PAIR_LOSSES, STACKED_LOSSES
from mstpass.graph import loop_op
from mstpass.problem.problem_json import encoded

LOOP = Case(chunk_tokens=3, length=64)  # a head whose loss runs in chunks


def test_a_case_is_named_by_its_seed_and_number() -> None:
    assert draw(3, 14) == draw(3, 14) != draw(3, 15) != draw(4, 15)


def test_a_case_that_is_kept_has_the_fields_that_are_not_plain() -> None:
    assert encoded(Case()) == {}
    kept = encoded(Case((Layer("scan", width=24),), loss="focal", again=((1, 7),)))
    assert json.loads(json.dumps(kept)) == {
        "layers": [{"kind": "scan", "width": 24}],
        "loss": "focal",
        "again": [[1, 7]],
    }


def test_every_choice_is_drawn() -> None:
    """Within 1,500 cases: each loss, op, size, and each form of each kind of layer."""
    cases = [draw(0, number) for number in range(1500)]
    layers = [layer for case in cases for layer in case.layers]
    for of_kind, records in ((Case, cases), (Layer, layers)):
        for field in dataclasses.fields(of_kind):
            values = [getattr(record, field.name) for record in records]
            if "items" in field.metadata:
                values = [item for items in values for item in items]
            listed = field.metadata.get("values", field.metadata.get("items", ()))
            assert set(listed) <= set(values), field.name
    drawn = {(layer.kind, layer.form) for layer in layers}
    assert drawn == {(kind, form) for kind, forms in KINDS.items() for form in forms}


def test_a_quarter_of_the_losses_join_rows_heads_or_batches() -> None:
    joined = {*PAIR_LOSSES, *STACKED_LOSSES, *DOUBLED_LOSSES}
    count = sum(draw(0, number).loss in joined for number in range(1000))
    assert 200 < count < 350


@pytest.mark.parametrize("loss", [*PAIR_LOSSES, *STACKED_LOSSES, *DOUBLED_LOSSES])
def test_every_loss_that_joins_runs(loss: str) -> None:
    """In eager mode, with gradients: of logits cut in each way, and of those of a single token."""
    for shift in SHIFTS:
        case = Case(loss=loss, shift=shift, features=8, vocabulary=11)
        assert any("grad" in name for name in Program.of(case).run()[0])
    Program.of(dataclasses.replace(case, batch=1, length=1)).run()


@pytest.mark.parametrize("loss", ["contrastive", "stack", "r_drop", "chunks"])
def test_losses_that_join_are_in_loops(loss: str) -> None:
    """Each is of a kind that has a rewrite of its own, which leaves no head whole."""
    checked = check_case(dataclasses.replace(LOOP, loss=loss))
    assert checked.status == "held", checked.failures
    assert any(name.startswith("lm_head") for name in checked.facts), checked.facts


def test_batches_of_several_ranges_take_several_plans() -> None:
    """Each batch is held to float64; labels are a view of the memory of the ids."""
    sizes = {"batch": 1, "length": 16, "again": ((3, 11), (4, 70), (2, 5))}
    case = dataclasses.replace(LOOP, dynamic="length", shift="views", **sizes)
    checked = check_case(case)
    assert checked.status == "held", checked.failures
    assert checked.facts["ranges of lengths"] == 2, "up to 16 and 256"
    assert "words.narrow(1, 1, length)" in source(case)


def test_every_case_has_a_source() -> None:
    for number in range(100):
        ast.parse(source(draw(1, number)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_runs(kind: str) -> None:
    for variant in range(len(KINDS[kind])):
        case = Case((Layer(kind, variant, act="tanh"),), chunk="off")
        checked = check_case(case) if variant == 0 else None
        assert checked is None or checked.status == "held", checked
        exec(compile(source(case), "case", "exec"), {"__name__": "case"})


_MORE = [pytest.param(number, marks=pytest.mark.full) for number in range(4, 40)]


@pytest.mark.parametrize("number", [*range(4), *_MORE])
def test_cases_hold(number: int) -> None:
    checked = check_case(draw(20, number))
    assert checked.status != "failed", checked.failures


@pytest.mark.slow
def test_a_case_holds_under_inductor() -> None:
    checked = check_case(dataclasses.replace(LOOP, length=64, vocabulary=600), INDUCTOR)
    assert checked.status == "held", checked.failures
    assert checked.peaks is not None and checked.facts["lm_head fused"] == 1


@pytest.fixture
def last_chunk_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = loop_op._chunks

    def without_the_last(*args: Any) -> Iterator[Any]:
        yield from list(chunks(*args))[:-1]

    monkeypatch.setattr(loop_op, "_chunks", without_the_last)


@pytest.mark.usefixtures("last_chunk_is_lost")
def test_an_error_is_found_shrunk_and_made_into_a_test() -> None:
    layer = Layer("attention", norm="rms", residual="add")
    case = dataclasses.replace(LOOP, layers=(layer,), loss="smoothing", dtype="float64")
    kinds = {failure.kind for failure in check_case(case).failures}
    assert kinds == {"wrong value", "wrong graph"}
    smallest = reduce(case, lambda other: bool(check_case(other).failures), budget=20)
    assert smallest.layers == () and smallest.loss == "cross_entropy"
    test = as_test(smallest, FAST, check_case(smallest).failures)
    assert len(test.splitlines()) < 40
    defined: dict[str, Any] = {"__name__": "shrunk"}
    exec(test, defined)
    with pytest.raises(AssertionError, match="wrong value"):
        defined["test_a_case_of_the_fuzzer"]()


@pytest.mark.usefixtures("last_chunk_is_lost")
def test_an_error_is_found_in_a_program_that_magnifies_rounding() -> None:
    scan = Layer("scan", ops=("center",), bias=True)
    case = dataclasses.replace(LOOP, layers=(scan,), final_norm="unit", batch=1)
    assert "wrong graph" in {failure.kind for failure in check_case(case).failures}


def test_a_case_that_eager_cannot_run_is_no_failure() -> None:
    checked = check_case(Case(length=0, loss="token_max"))
    assert checked.status == "invalid" and "IndexError" in checked.reason


def test_the_smallest_case_has_nothing_but_the_reason() -> None:
    def fails(case: Case) -> bool:
        return any(l.kind == "experts" and l.norm != "none" for l in case.layers)

    number = next(n for n in range(1000) if fails(draw(0, n)) and len(draw(0, n).layers) == 3)
    layers = (Layer(kind="experts", norm="layer"),)
    assert reduce(draw(0, number), fails, budget=1000) == Case(layers)


@pytest.mark.full
def test_the_command_keeps_results_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path), "--seed", "20", "--case-seconds", "600"]
    first = '{"number": 0, "status": "held"}\n'
    (tmp_path / "fast-20.jsonl").write_text(first + '{"number": 1, "sta')  # cut short: runs again
    assert fuzz.main(["--cases", "2", *folder]) == fuzz.HELD
    assert (tmp_path / "fast-20.jsonl").read_text().startswith(first)
    assert "2 cases" in capsys.readouterr().out
    assert sorted(Campaign(FAST, 20, tmp_path).known()) == [0, 1]


def test_what_is_known_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def known(_: Campaign) -> dict[int, dict[str, Any]]:
        nonlocal reads
        reads += 1
        return {number: {} for number in range(50)}

    monkeypatch.setattr(Campaign, "known", known)
    Campaign(FAST, 0, tmp_path).run(range(50), jobs=1, done=lambda result: pytest.fail(str(result)))
    assert reads == 1


def test_a_case_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    Campaign(FAST, 0, tmp_path, case_s=0.01).run(range(2), jobs=1, done=results.append)
    assert [r["failures"][0]["kind"] for r in results] == ["hung", "hung"]


@pytest.mark.full
def test_one_case_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--only", "3", "--seed", "20"]) == fuzz.HELD
    shown = capsys.readouterr().out
    assert "class Model(nn.Module):" in shown and "# held" in shown


def test_torch_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    check_case(LOOP)
    assert torch.get_num_threads() == threads


def test_a_value_outside_of_its_fields_list_shrinks_too() -> None:
    """Large cases have lengths that no field lists."""
    smaller = [case.length for case in smaller_cases(Case(length=96))]
    assert {2, 8, 300} <= set(smaller), "all listed lengths are plainer"


def test_what_draws_is_held_to_inductor_alone_within_eager_modes_rounding() -> None:
    true = {"grad weight": torch.ones(4, dtype=torch.float64)}
    eager = {"grad weight": torch.full((4,), 1 + 1e-5)}  # other random numbers than alone's
    alone = {"grad weight": torch.full((4,), 2.0)}
    references = References([eager], [true], [alone])
    for error, right in ((0.0, True), (5e-5, True), (7e-5, False)):
        found = wrong_values([{"grad weight": torch.full((4,), 2 + 2 * error)}], references, Case())
        assert (not found) == right, found


def test_sums_in_sixteen_bits_may_round_at_each_chunk() -> None:
    true = {"gradient of a bias": torch.ones(4, dtype=torch.float64)}
    eager = {name: value.bfloat16() for name, value in true.items()}
    ours = {name: value * 1.2 for name, value in eager.items()}
    for accumulate, is_wrong in (("float32", True), ("input", False)):
        options = {"chunk_tokens": 3, "accumulate": accumulate}
        setup = Case(length=150, dtype="bfloat16", **options)  # 100 chunks
        wrong = wrong_values([ours], References([eager], [true]), setup)
        assert bool(wrong) == is_wrong


@pytest.mark.slow
@pytest.mark.full
def test_inductor_alone_is_right_where_its_vectorized_code_is_not() -> None:
    """Up to torch 2.13 it adds the embedding's gradient at wrong indices, also out of bounds."""
    convolution = Layer("convolution", variant=11, act="softmax", dropout=0.1, same=True)
    case = Case((convolution,), final_norm="rms", batch=1, length=31, features=24, vocabulary=97)
    checked = check_case(case, INDUCTOR)
    assert checked.status == "held", (checked.reason, *map(str, checked.failures))
