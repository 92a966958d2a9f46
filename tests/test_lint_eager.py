"""The linter on eager steps: runs and wasted flops equal those counted by hand.

Each wasteful step has a counterpart without waste, on which the linter must find nothing.
"""

import ctypes
import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import mstpass
from tests.lint_models import (
    MM,
    NON_REENTRANT,
    REENTRANT,
    TOKENS,
    WIDTH,
    Block,
    Model,
    by_kind,
    runs,
    tokens,
)

# --- nested checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "outer", "ups", "downs", "how"),
    [
        # the inner one's recomputation runs to the end, in each of the two backwards
        (REENTRANT, NON_REENTRANT, 2, 2, "reentrant in non-reentrant"),
        (REENTRANT, REENTRANT, 2, 2, "both reentrant"),
        # the inner one stops before `down`; the outer one does not
        (NON_REENTRANT, REENTRANT, 2, 1, "non-reentrant in reentrant"),
    ],
)
def test_two_checkpoints_around_each_layer(inner, outer, ups, downs, how):
    model = Model(inner, outer)
    report = mstpass.lint(model, tokens())

    assert report.step_flops == 2 * (6 + ups + downs) * MM
    nested = by_kind(report, "nested checkpoints")
    assert set(nested) == {"layers.0", "layers.1"}
    for finding in nested.values():
        assert (finding.forward_runs, finding.recompute_runs) == (1, 2)
        # a second `up`, and a second `down` where there is one; the first `down` is dead
        assert finding.wasted_flops == (ups - 1 + downs - 1) * MM
        assert finding.wasted_share == pytest.approx(finding.wasted_flops / report.step_flops)
        assert how in finding.cause
        assert "lint_models.py" in finding.cause
        assert "keep one of the two" in finding.fix
    dead = by_kind(report, "dead recompute")
    assert {name: f.wasted_flops for name, f in dead.items()} == {
        "layers.0.down": MM,
        "layers.1.down": MM,
    }
    assert runs(report)["layers.0"] == (1, 2)
    assert runs(report)["layers.1.down"] == (1, downs)
    assert runs(report)["Model"] == (1, 0)


def test_without_the_waste_the_step_is_that_of_one_checkpoint():
    nested = mstpass.lint(Model(REENTRANT, NON_REENTRANT), tokens())
    single = mstpass.lint(Model(NON_REENTRANT), tokens())
    assert nested.step_flops - nested.wasted_flops == single.step_flops


def test_two_non_reentrant_ones_stop_early_and_are_only_noted():
    report = mstpass.lint(Model(NON_REENTRANT, NON_REENTRANT), tokens())
    assert not report.findings
    assert report.step_flops == 2 * 7 * MM
    assert runs(report)["layers.0.up"] == (1, 1)
    (note,) = report.notes
    assert note.startswith("layers.* (2 of them): checkpoint() at lint_models.py:")
    assert "remove one of them" in note


def test_two_non_reentrant_ones_that_may_not_stop_early():
    with set_checkpoint_early_stop(False):
        report = mstpass.lint(Model(NON_REENTRANT, NON_REENTRANT), tokens())
    nested = by_kind(report, "nested checkpoints")
    assert {name: f.wasted_flops for name, f in nested.items()} == {
        "layers.0": 2 * MM,
        "layers.1": 2 * MM,
    }
    assert "both non-reentrant" in nested["layers.0"].cause


def test_a_checkpoint_around_checkpointed_layers():
    """The outer one reruns both layers to get at their inputs, and at what the loss saves."""
    model = Model(NON_REENTRANT)
    report = mstpass.lint(lambda x: checkpoint(model, x, use_reentrant=False), tokens())
    nested = by_kind(report, "nested checkpoints")
    # `up` runs a second time; `down` runs once and leads to the next layer's input, or the loss
    assert {name: f.wasted_flops for name, f in nested.items()} == {"layers.0": MM, "layers.1": MM}
    assert "runs 2 inner ones once more" in nested["layers.0"].cause
    assert report.step_flops == (2 * 7 + 2 * 2) * MM
    assert len(report.findings) == 2


def test_checkpoint_wrapper_twice_names_it():
    layer = checkpoint_wrapper(checkpoint_wrapper(Block(), CheckpointImpl.REENTRANT))
    report = mstpass.lint(lambda x: layer(x).sum(), tokens())
    (finding,) = by_kind(report, "nested checkpoints").values()
    assert finding.module == "Block"
    assert "checkpoint_wrapper around checkpoint_wrapper (reentrant in non-" in finding.cause
    assert "apply_activation_checkpointing" in finding.fix


# --- steps without waste: nothing to find -------------------------------------------------------


def test_one_checkpoint():
    report = mstpass.lint(Model(NON_REENTRANT), tokens())
    assert not report.findings
    assert not report.notes
    assert report.step_flops == 2 * 7 * MM
    assert runs(report)["layers.0.up"] == (1, 1)
    assert runs(report)["layers.0.down"] == (1, 0)


def test_no_checkpoint():
    report = mstpass.lint(Model(), tokens())
    assert not report.findings
    assert report.step_flops == 2 * 6 * MM
    assert runs(report)["layers.0"] == (1, 0)


@pytest.mark.parametrize("styles", [(), (NON_REENTRANT,)])
def test_shared_layers_may_run_often(styles):
    model = Model(*styles, depth=1)
    model.layers.append(model.layers[0])
    report = mstpass.lint(model, tokens())
    assert not report.findings
    assert runs(report)["layers.0.up"] == (2, 2 * len(styles))


def test_a_module_called_twice_in_one_checkpoint():
    block = Block()
    report = mstpass.lint(
        lambda x: checkpoint(lambda y: block(block(y)), x, use_reentrant=False).sum(), tokens()
    )
    assert not report.findings
    assert runs(report)["up"] == (2, 2)


def test_microbatches():
    model = Model(NON_REENTRANT)

    def step():
        for _ in range(3):
            model(tokens()).backward()

    report = mstpass.lint(step)
    assert not report.findings
    assert runs(report)["layers.0.up"] == (3, 3)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("style", [REENTRANT, NON_REENTRANT])
def test_a_run_without_gradients_hides_no_finding_and_makes_none(style):
    def step(model):
        with torch.no_grad():
            model(tokens())
        return model(tokens())

    assert not by_kind(mstpass.lint(step, Model(style)), "nested checkpoints")
    nested = mstpass.lint(step, Model(style, REENTRANT))
    assert len(by_kind(nested, "nested checkpoints")) == 2


def test_a_part_without_gradients_in_a_checkpoint():
    block = Block()

    def masked(x):
        with torch.no_grad():
            mask = block(x) > 0
        return block(x * mask)

    report = mstpass.lint(lambda: checkpoint(masked, tokens(), use_reentrant=False).sum())
    assert not report.findings


def test_autograd_grad_in_a_forward():
    block = Block()

    def step():
        x = tokens()
        (slope,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
        return slope.square().sum()

    report = mstpass.lint(step)
    assert not report.findings
    assert runs(report)["Block"] == (1, 0)
    # autograd.grad is not the step's backward, which lint runs as well: two products each in the
    # forward and in the slope, and more in the slope's own backward
    assert report.step_flops > 4 * MM


def _selective(*saved):
    def policy(ctx, op, *args, **kwargs):
        save = op in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def test_selective_checkpointing():
    block = Block()

    def step(context):
        out = checkpoint(block, tokens(), use_reentrant=False, context_fn=context)
        return out.square().mean()

    saving = mstpass.lint(step, _selective(torch.ops.aten.mm.default))
    assert not saving.findings
    assert saving.step_flops == 6 * MM
    recomputing = mstpass.lint(step, _selective())
    assert not recomputing.findings
    assert recomputing.step_flops == 7 * MM


# --- dead recompute and repeated backward -------------------------------------------------------


def test_the_last_product_of_a_reentrant_checkpoint_is_dead():
    report = mstpass.lint(Model(REENTRANT), tokens())
    assert {f.module: f.wasted_flops for f in report.findings} == {
        "layers.0.down": MM,
        "layers.1.down": MM,
    }
    finding = report.findings[0]
    assert finding.kind == "dead recompute"
    assert (finding.forward_runs, finding.recompute_runs) == (1, 1)
    assert "use_reentrant=False in the checkpoint() call at lint_models.py" in finding.fix
    assert report.step_flops == 2 * 8 * MM


class Frozen(nn.Module):
    """The first product's result is added up: no gradient reads it."""

    def __init__(self, freeze):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.freeze = freeze

    def forward(self, x):
        offset = self.first(x)
        return offset + self.block(x) * self.scale if self.freeze else self.block(offset)


@pytest.mark.parametrize("dead", [True, False])
def test_the_first_product_of_a_block(dead):
    model = Frozen(dead)
    report = mstpass.lint(lambda x: checkpoint(model, x, use_reentrant=False).sum(), tokens())
    wasted = {f.module: (f.kind, f.wasted_flops) for f in report.findings}
    first = ("dead recompute", 2 * TOKENS * WIDTH * WIDTH)
    assert wasted == ({"first": first} if dead else {})
    if dead:
        assert "move it out of the checkpoint" in report.findings[0].fix


def test_two_backwards_through_one_checkpoint():
    def step():
        loss = Model(NON_REENTRANT, depth=1)(tokens())
        loss.backward(retain_graph=True)
        loss.backward()

    (finding,) = mstpass.lint(step).findings
    assert finding.kind == "repeated backward"
    assert (finding.forward_runs, finding.recompute_runs) == (1, 2)
    assert finding.wasted_flops == MM
    assert "call backward once" in finding.fix


class Tiled(torch.autograd.Function):
    """Recomputes on its own, once or more, as hand-written checkpointing does."""

    @staticmethod
    def forward(ctx, x, block, times):
        ctx.save_for_backward(x)
        ctx.block, ctx.times = block, times
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        for _ in range(ctx.times):
            with torch.enable_grad():
                again = x.detach().requires_grad_()
                out = ctx.block(again)
        torch.autograd.backward(out, grad)
        return again.grad, None, None


@pytest.mark.parametrize("times", [1, 3])
def test_an_autograd_function_that_recomputes(times):
    block = Block()
    report = mstpass.lint(lambda: Tiled.apply(tokens(), block, times).sum())
    unknown = by_kind(report, "unknown")
    assert {n: f.wasted_flops for n, f in unknown.items()} == (
        {"up": 2 * MM, "down": 2 * MM} if times == 3 else {}
    )
    assert set(by_kind(report, "dead recompute")) == {"down"}


def raw(tensor):
    return (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())


class Opaque(torch.autograd.Function):
    """x**3 / 3 by code that no dispatcher sees, as kernels launched by hand are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        raw(out)[:] = [value**3 / 3 for value in raw(x)]
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(grad)
        raw(out)[:] = [g * value**2 for g, value in zip(raw(grad), raw(x), strict=True)]
        return out


@pytest.mark.parametrize("style", [REENTRANT, NON_REENTRANT])
def test_what_hidden_kernels_read_is_of_use(style):
    block = Block()
    report = mstpass.lint(
        lambda x: checkpoint(
            lambda y: block.down(Opaque.apply(block.up(y))), x, use_reentrant=style
        ).mean(),
        tokens(),
    )
    dead = by_kind(report, "dead recompute")
    assert set(dead) == ({"down"} if style == REENTRANT else set())
