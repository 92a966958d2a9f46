"""Contenders of a benchmark are compiled, compared, and timed in interleaved rounds."""

import torch
import torch.nn.functional as F

from mstpass.bench import comparison, models, results
from mstpass.bench.harness import Arguments
from mstpass.bench.models import Head, LlamaSize, Step, Work, llama

CPU = torch.device("cpu")


def row(name, *seconds, **rest):
    return results.Row(name, seconds=list(seconds), **rest)


def test_ratios_are_taken_round_by_round():
    assert results.ratios(row("a", 2.0, 6.0, 9.0), row("b", 1.0, 2.0, 10.0)) == (2.0, 0.9, 3.0)


def test_no_ratio_without_both_or_after_an_error():
    assert results.ratios(row("a"), row("b", 1.0)) is None
    assert results.ratios(row("a", 1.0), row("b", 1.0, 1.0)) is None
    assert results.ratios(row("a", 1.0, error="broke"), row("b", 1.0)) is None


def test_the_floor_of_a_head():
    head = Head.build(100, 8, 50, CPU)
    assert head.floor_bytes(chunks=3) == 4 * (50 * 8 + 100 * 8 + 34 * 50)


def test_own_code_is_another_code_object_with_the_same_result():
    offset = 3
    fn = lambda: torch.tensor(1) + offset
    assert comparison.own_code(fn)() == fn()
    assert comparison.own_code(fn).__code__ is not fn.__code__


def test_hand_tiled_parts_equal_the_plain_model():
    model, ids_BS, target_BS = llama(LlamaSize(16, 1, 2, 32, 64, 20), CPU)
    leaves = list(model.parameters())
    right, gradients = Step(lambda: model(ids_BS, target_BS), leaves).with_gradients()
    # 20 tokens in 3 tiles: the last one is shorter
    tiled_fn = lambda: model(ids_BS, target_BS, checkpointed=True, chunks=3)
    loss, tiled_gradients = Step(tiled_fn, leaves).with_gradients()
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(tiled_gradients, gradients)
    assert all(leaf.grad is None for leaf in leaves)


def test_the_tiled_loss_scales_with_its_tangent():
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.randint(5, (6,))
    found = torch.autograd.grad(3 * models.tiled_head_loss(x, w, target, 4), (x, w))
    right = torch.autograd.grad(3 * F.cross_entropy(x @ w.T, target), (x, w))
    torch.testing.assert_close(found, right)


def test_one_that_fails_and_one_that_is_wrong_do_not_end_the_race():
    head = Head.build(8, 4, 10, CPU)

    def broken():
        raise ValueError("no such luck")

    contenders = [
        comparison.eager(),
        comparison.eager("broken", broken),
        comparison.eager("wrong value", lambda: 2 * head.loss()),
        comparison.eager(
            "wrong gradient", lambda: head.loss() + (head.weight - head.weight.detach()).sum()
        ),
    ]
    seen = []
    arguments = Arguments(repeats=2, quick=True, device=CPU)
    rows = comparison.compare(contenders, head.work(), arguments, seen.append)
    assert rows["eager"].error == ""
    assert len(rows["eager"].seconds) == 2
    assert rows["eager"].peak_bytes > 0
    assert rows["broken"].error == "ValueError: no such luck"
    assert "value differs" in rows["wrong value"].error
    assert "gradient differs" in rows["wrong gradient"].error
    assert seen.count("eager") == 4


def test_a_gradient_that_is_no_number_is_wrong_and_one_of_noise_is_not():
    x, w = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)

    def loss(of_x, of_w):
        return lambda: (x * of_x).sum() + (w * of_w).sum() * 1e-30

    run = comparison.Comparison(Work(loss(1.0, 1.0), (x, w)), CPU)
    run.add([comparison.eager(), comparison.eager("noise", loss(1.0, -1.0))])
    run.add([comparison.eager("nan", lambda: loss(1.0, 1.0)() + 0 * (w.log() * 0).sqrt().sum())])
    assert run.rows["eager"].error == run.rows["noise"].error == ""
    assert "a gradient differs from that of eager by nan" in run.rows["nan"].error


def test_contenders_that_are_added_later_are_timed_in_the_same_rounds():
    head = Head.build(8, 4, 10, CPU)
    run = comparison.Comparison(head.work(), CPU)
    run.add([comparison.eager()])
    run.measure_peaks()
    peak = run.rows["eager"].peak_bytes
    run.add([comparison.eager("late"), comparison.eager("wrong", lambda: 2 * head.loss())])
    run.time(2)
    run.measure_peaks()
    assert run.rows["eager"].peak_bytes == peak == run.rows["late"].peak_bytes
    assert len(run.rows["eager"].seconds) == len(run.rows["late"].seconds) == 2
    assert "value differs" in run.rows["wrong"].error
