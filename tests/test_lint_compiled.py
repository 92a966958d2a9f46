"""The linter on graphs: split by torch, edited by hand, and of real compilations."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mstpass
from mstpass.linter import LintError
from mstpass.linter.graph_findings import _merge, graph_flops
from mstpass.linter.report import Finding, LintReport
from tests.lint_models import INNER, MM, NON_REENTRANT, TOKENS, WIDTH, Model, tokens

aten = torch.ops.aten


def pair(fn, *args):
    """Forward and backward of a function, split by torch's partitioner, with nothing compiled."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    torch.compile(fn, backend=backend)(*args).backward()
    assert len(graphs) == 2
    return graphs


def save_down(ctx, op, *args, **kwargs):
    save = op is aten.mm.default and args[1].shape == (INNER, WIDTH)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class SavesDown(Model):
    """The blocks save their last products, as the linter advises."""

    def forward(self, x):
        context = functools.partial(create_selective_checkpoint_contexts, save_down)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=context)
        return x.square().mean()


@pytest.mark.parametrize("styles", [(NON_REENTRANT,), (NON_REENTRANT, NON_REENTRANT)])
def test_the_output_of_the_last_checkpointed_block(styles):
    """Nested ones compile into one; unlike eager, it redoes the last product for the loss."""
    report = mstpass.lint_graphs(*pair(Model(*styles), tokens()))
    assert report.step_flops == (12 + 2 + 1) * MM  # `up` again twice, `down` once
    (finding,) = report.findings
    assert finding.kind == "recomputed block output"
    assert (finding.forward_runs, finding.recompute_runs) == (1, 1)
    assert finding.wasted_flops == MM
    assert finding.wasted_share == pytest.approx(1 / 15)
    assert finding.source == "layers.1.down"


def test_a_block_output_that_is_saved_as_advised():
    report = mstpass.lint_graphs(*pair(SavesDown(), tokens()))
    assert not report.findings
    assert report.step_flops == (12 + 2) * MM


def test_no_checkpoint():
    report = mstpass.lint_graphs(*pair(Model(), tokens()))
    assert not report.findings
    assert report.step_flops == 12 * MM


def _users_product(graph):
    """A product of backward that reads a saved product, and the saved one."""
    saved = next(n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("mm"))
    return saved, next(iter(saved.users))


def test_recomputed_though_saved():
    forward, backward = pair(Model(), tokens())
    saved, user = _users_product(backward.graph)
    original = next(n for n in forward.graph.nodes if n.name == saved.name)
    left, right = original.args
    # primals are in both graphs; the first product's operand is one
    by_name = {n.name: n for n in backward.graph.nodes}
    with backward.graph.inserting_before(user):
        weight = backward.graph.call_function(aten.t.default, (by_name[right.args[0].name],))
        weight.meta = dict(right.meta)
        again = backward.graph.call_function(aten.mm.default, (by_name[left.name], weight))
        again.meta = dict(original.meta)
    user.replace_input_with(saved, again)
    (finding,) = mstpass.lint_graphs(forward, backward).findings
    assert finding.kind == "recomputed though saved"
    assert saved.name in finding.fix
    assert finding.wasted_flops == MM


def test_dead_products():
    forward, backward = pair(Model(), tokens())
    product = next(n for n in backward.graph.nodes if n.target is aten.mm.default)
    with backward.graph.inserting_after(product):
        dead = backward.graph.call_function(aten.mm.default, (product, product))
        dead.meta = dict(product.meta)
    (finding,) = mstpass.lint_graphs(forward, backward).findings
    assert (finding.kind, finding.module) == ("dead recompute", dead.name)


def _graph(fn):
    args = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WIDTH)
    return make_fx(fn, tracing_mode="fake")(*args)


@pytest.mark.parametrize(
    ("fn", "duplicates"),
    [
        (lambda x, w: (x @ w).sin() + (x @ w).cos(), 1),
        (lambda x, w: (x.exp() @ w).sin() + (x.exp() @ w).cos(), 1),
        (lambda x, w: (x @ w).sin() + (x.sin() @ w).cos(), 0),
        # two dropouts differ, though their graphs look alike
        (lambda x, w: F.dropout(x) @ w + F.dropout(x) @ w, 0),
    ],
)
def test_duplicates_in_one_graph(fn, duplicates):
    found = mstpass.lint_graphs(_graph(fn)).findings
    assert [f.kind for f in found] == ["duplicate"] * duplicates
    assert all(f.wasted_flops == 2 * TOKENS * WIDTH * WIDTH for f in found)


@pytest.mark.slow
def test_a_compiled_step():
    """torch's partitioner recomputes what leaves the last block; ours does not."""
    model = torch.compile(Model(NON_REENTRANT), backend="inductor")
    report = mstpass.lint_compiled(model, tokens())
    assert [f.kind for f in report.findings] == ["recomputed block output"]
    assert report.findings[0].source == "layers.1.down"
    assert report.step_flops == 15 * MM
    assert report.notes == ("1 compiled graph read",)
    torch.compiler.reset()
    report = mstpass.lint_compiled(torch.compile(Model(NON_REENTRANT), backend="mst"), tokens())
    assert not report.findings and report.step_flops == 14 * MM


@pytest.mark.slow
def test_the_flops_of_loops_count():
    weight = torch.randn(512, WIDTH, requires_grad=True)
    labels = torch.randint(512, (64,))
    hidden = torch.randn(64, WIDTH, requires_grad=True)
    step = torch.compile(
        lambda: F.cross_entropy(hidden @ weight.t(), labels),
        backend="mst",
        options={"chunk_tokens": 16},
    )
    report = mstpass.lint_compiled(step)
    assert mstpass.reports()[-1].regions[0].num_chunks == 4
    assert report.step_flops == 3 * 2 * 64 * WIDTH * 512
    assert not report.findings


def test_a_step_that_compiles_nothing():
    with pytest.raises(LintError, match="Inductor compiled nothing"):
        mstpass.lint_compiled(Model(), tokens())


def test_linting_leaves_compiled_functions_compilable():
    compiled = []

    def backend(gm, example_inputs):
        compiled.append(gm)
        return gm.forward

    step = torch.compile(Model(NON_REENTRANT), backend=backend)
    mstpass.lint(step, tokens())
    assert not compiled
    step(tokens())
    assert compiled


def test_flops_of_a_graph():
    assert graph_flops(_graph(lambda x, w: x @ w).graph) == 2 * TOKENS * WIDTH * WIDTH


def test_a_nested_plan_is_a_note() -> None:
    """A matmul that backward runs twice is a finding, but a note where mst's plan asks for it."""
    one = Finding("duplicate", "mm", 1, 2, 100, 0.0, "", "")
    report = LintReport((one,), 1000)
    assert [f.wasted_share for f in _merge([report], nested=False).findings] == [0.1]
    planned = _merge([report], nested=True)
    assert not planned.findings and "10.0% of the step" in str(planned)
    in_forward = dataclasses.replace(one, forward_runs=2, recompute_runs=0)
    assert _merge([LintReport((in_forward,), 1000)], nested=True).findings
