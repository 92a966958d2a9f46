"""Passes as data: what a pass breaks is caught, named and refused; what it changes is printed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mstpass import normalize, pipeline, pipeline_stages
from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.graph_text import graph_text
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.loop_op import mst_loop
from mstpass.graph.rewriting import Rewriting
from mstpass.loops.apply_plans import apply_plans
from mstpass.options import Options
from mstpass.passes import runner
from mstpass.passes.facts import pure_loops
from mstpass.passes.runner import InPlacePass, Pass, PassError, PassRunner
from mstpass.plans import Outcome
from mstpass.report import store
from mstpass.report.report import Report
from tests.checks import joint_graph

aten = torch.ops.aten
Break = Callable[[JointGraph, Builder], None]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _step(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).t().sigmoid().sum()


def _joint() -> JointGraph:
    return JointGraph(*joint_graph(_step, _leaf(6, 4), _leaf(4, 8)))


def _head() -> tuple[fx.GraphModule, int]:
    labels = torch.randint(600, (512,))
    return joint_graph(lambda x, w: F.cross_entropy(x @ w, labels), _leaf(512, 32), _leaf(32, 600))


def _first(joint: JointGraph, target: Any) -> fx.Node:
    return next(node for node in joint.nodes if node.target is target)


def _edited(joint: JointGraph, change: Break) -> JointGraph:
    new = joint.copy()
    change(new, Builder(new.module.graph, fake_mode_of(new.nodes)))
    return JointGraph(new.module, new.num_fwd_outputs)


def _broken(change: Break) -> Pass:
    return Pass("breaks", lambda joint: (_edited(joint, change), frozenset()))


# ---- what passes break ---------------------------------------------------------------------------
def _stale_strides(joint: JointGraph, builder: Builder) -> None:
    """The product lies in memory column by column, which nobody tells its readers."""
    product = _first(joint, aten.mm.default)
    readers = list(product.users)
    with builder.graph.inserting_after(product):
        rows = builder.call(aten.permute.default, product, [1, 0])
    with builder.graph.inserting_after(rows):
        copy = builder.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    with builder.graph.inserting_after(copy):
        back = builder.call(aten.permute.default, copy, [1, 0])
    for reader in readers:
        reader.replace_input_with(product, back)


def _stale_storage(joint: JointGraph, builder: Builder) -> None:
    product = _first(joint, aten.mm.default)
    readers = list(product.users)
    with builder.graph.inserting_after(product):
        copy = builder.call(aten.clone.default, product)
    for reader in readers:
        reader.replace_input_with(product, copy)


def _wrong_dtype(joint: JointGraph, builder: Builder) -> None:
    sigmoid = _first(joint, aten.sigmoid.default)
    with builder.graph.inserting_before(sigmoid):
        (given,) = sigmoid.all_input_nodes
        cast = builder.call(torch.ops.prims.convert_element_type.default, given, torch.float64)
    sigmoid.replace_input_with(given, cast)


def _wrong_shape(joint: JointGraph, builder: Builder) -> None:
    _first(joint, aten.sum.default).update_kwarg("dtype", torch.float64)
    permuted = _first(joint, aten.permute.default)
    permuted.update_arg(1, [0, 1])


def _read_before_write(joint: JointGraph, builder: Builder) -> None:
    sigmoid = _first(joint, aten.sigmoid.default)
    sigmoid.all_input_nodes[0].prepend(sigmoid)


def _wrong_phase(joint: JointGraph, builder: Builder) -> None:
    tangent = next(n for n in joint.nodes if n in joint.backward and n.op == "placeholder")
    sigmoid = _first(joint, aten.sigmoid.default)
    (given,) = sigmoid.all_input_nodes
    with builder.graph.inserting_before(sigmoid):
        scaled = builder.call(aten.mul.Tensor, given, tangent)
    sigmoid.replace_input_with(given, scaled)


def _other_result(joint: JointGraph, builder: Builder) -> None:
    gradients = list(joint.output.args[0])  # type: ignore[arg-type]
    with builder.graph.inserting_before(joint.output):
        rows = builder.call(aten.permute.default, gradients[-1], [1, 0])
        copy = builder.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        gradients[-1] = builder.call(aten.permute.default, copy, [1, 0])
    joint.output.args = (tuple(gradients),)


def _lost_result(joint: JointGraph, builder: Builder) -> None:
    joint.output.args = (joint.output.args[0][:-1],)  # type: ignore[index]


BROKEN = (
    (_stale_strides, "strides are recorded as"),
    (_stale_storage, "another storage"),
    (_wrong_dtype, "dtype is recorded as torch.float32, but is torch.float64"),
    (_wrong_shape, "shape is recorded as"),
    (_read_before_write, "reads permute before it is written"),
    (_wrong_phase, "depends on a tangent"),
    (_other_result, "is a result of the step: strides"),
    (_lost_result, "results in place of"),
)


@pytest.fixture
def in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST", runner.OFF)


@pytest.mark.parametrize(("change", "reason"), BROKEN)
def test_what_a_pass_breaks_is_refused(change: Break, reason: str, in_production: None) -> None:
    joint = _joint()
    running = PassRunner(verify=True)
    assert running.run(_broken(change), joint) == (joint, None)
    (refusal,) = running.refused
    assert refusal.stage == "verify" and "the pass breaks is refused" in refusal.reason
    assert reason in refusal.reason
    new, _ = PassRunner(verify=False).run(_broken(change), joint)
    assert new is not joint, "without the option nothing is verified"


@pytest.mark.parametrize(("change", "reason"), BROKEN)
def test_what_a_pass_breaks_is_an_error_in_tests(change: Break, reason: str) -> None:
    with pytest.raises(PassError, match="breaks: ") as caught:
        PassRunner().run(_broken(change), _joint())
    assert reason in str(caught.value)


def test_a_read_behind_a_write_is_refused(in_production: None) -> None:
    def step(x: Tensor, buffer: Tensor) -> Tensor:
        result = (x + buffer).sin()
        buffer.add_(1)
        return result.sum()

    joint = JointGraph(*joint_graph(step, _leaf(8), torch.ones(8)))
    writes = [node for node in joint.nodes if node.target is aten.copy_.default]
    if not writes:
        pytest.skip("this torch returns the new value")

    def late(new: JointGraph, builder: Builder) -> None:
        write = next(n for n in new.nodes if n.target is aten.copy_.default)
        with builder.graph.inserting_before(new.output):
            builder.call(aten.clone.default, write.args[0])

    running = PassRunner(verify=True)
    assert running.run(_broken(late), joint) == (joint, None)
    assert "after it was overwritten" in running.refused[0].reason


def test_what_was_wrong_before_is_no_fault_of_a_pass() -> None:
    joint = _edited(_joint(), _wrong_dtype)
    PassRunner().run(_broken(lambda new, builder: None), joint)
    with pytest.raises(PassError, match="shape"):
        PassRunner().run(_broken(_wrong_shape), joint)


# ---- loops ---------------------------------------------------------------------------------------
def _with_loops() -> JointGraph:
    module, outputs = _head()
    options = Options(free_overhead=1.0)
    found = pipeline.run(module, options, num_fwd_outputs=outputs, stop_after="apply")
    assert found.joint is not None
    return JointGraph(found.joint, outputs)


def _body_writes(joint: JointGraph, body: fx.Graph) -> None:
    chunk, *_ = body.find_nodes(op="placeholder")
    with body.inserting_before(chunk.next.next.next):
        body.call_function(aten.mul_.Tensor, (chunk, 2.0)).meta["val"] = chunk.meta["val"]


def _body_of_other_rows(joint: JointGraph, body: fx.Graph) -> None:
    chunk, *_ = body.find_nodes(op="placeholder")
    chunk.meta["val"] = chunk.meta["val"].double()


def _body_returns_less(joint: JointGraph, body: fx.Graph) -> None:
    output = body.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_body_writes, "its body writes to an operand"),
        (_body_of_other_rows, "float64"),
        (_body_returns_less, "its body returns"),
    ],
)
def test_an_impure_loop_is_refused(
    change: Callable[[JointGraph, fx.Graph], None], reason: str, in_production: None
) -> None:
    module, outputs = _head()
    joint, looped = JointGraph(module, outputs), _with_loops()
    loop = next(node for node in looped.nodes if node.target is mst_loop)
    body = getattr(looped.module, str(loop.args[0].target))  # type: ignore[union-attr]
    change(looped, body.graph)
    running = PassRunner(verify=True)
    step = Pass("loops", lambda joint: (looped, None), after=(pure_loops,))
    assert running.run(step, joint) == (joint, None)
    assert reason in running.refused[0].reason and "the pass loops is" in running.refused[0].reason


# ---- the pipeline --------------------------------------------------------------------------------
def test_a_pass_is_refused_and_the_step_keeps_its_loops(
    monkeypatch: pytest.MonkeyPatch, in_production: None
) -> None:
    def change(joint: JointGraph, builder: Builder) -> None:
        product = _first(joint, aten.mm.default)
        product.meta["val"] = product.meta["val"].double()

    monkeypatch.setattr(normalize, "TOKENS", (_broken(change), *normalize.TOKENS))
    module, outputs = _head()
    options = Options(free_overhead=1.0, verify=True)
    outcome = pipeline.run(module, options, num_fwd_outputs=outputs).outcome
    assert outcome.regions
    (refusal,) = (r for r in outcome.rejections if r.stage == "verify")
    assert refusal.node == "mm" and "the pass breaks is refused: mm dtype" in refusal.reason
    assert "the pass breaks is refused" in str(Report(outcome))


def test_loops_are_refused_and_the_step_has_none(
    monkeypatch: pytest.MonkeyPatch, in_production: None
) -> None:
    def broken(joint: JointGraph, plans: Any) -> JointGraph:
        looped = apply_plans(joint, plans)
        for node in looped.nodes:
            if node.target is mst_loop:
                body = getattr(looped.module, str(node.args[0].target))
                _body_returns_less(joint, body.graph)
        return looped

    monkeypatch.setattr(pipeline_stages, "apply_plans", broken)
    module, outputs = _head()
    options = Options(free_overhead=1.0, verify=True)
    result = pipeline.run(module, options, num_fwd_outputs=outputs)
    assert not result.outcome.regions and result.modules is not None
    reasons = [r.reason for r in result.outcome.rejections if r.stage == "verify"]
    told = "the pass apply_plans is refused: mst_loop_neg its body returns"
    assert any(told in r for r in reasons)


def test_no_guard_is_added() -> None:
    x, w = _leaf(6, 4), _leaf(4, 8)
    joint = JointGraph(*joint_graph(_step, x, w, dynamic=True))
    environment = fake_mode_of(joint.nodes).shape_env
    assert environment is not None
    new = _edited(joint, lambda new, builder: builder.compute_values({}))
    pairs = zip(joint.nodes, new.nodes, strict=True)
    assert all(a.meta["val"] is not b.meta["val"] for a, b in pairs if a.op == "call_function")
    before = len(environment.guards)
    PassRunner().run(Pass("renews", lambda joint: (new, None)), joint)
    assert len(environment.guards) == before


# ---- finished graphs -----------------------------------------------------------------------------
def test_a_pass_in_place_is_refused_and_the_graph_is_as_it_was(in_production: None) -> None:
    joint = _joint()
    before = graph_text(joint.module)

    def change(graph: fx.Graph) -> int:
        _wrong_dtype(JointGraph(joint.module, 0), Builder(graph, fake_mode_of(graph.nodes)))
        return 7

    running = PassRunner(verify=True)
    assert running.run_in_place(InPlacePass("late", change), joint.module.graph) is None
    assert "the pass late is refused" in running.refused[0].reason
    assert graph_text(joint.module) == before
    with pytest.raises(PassError, match="late: sigmoid dtype"):
        PassRunner(verify=True).run_in_place(
            InPlacePass("late", change, required=True), joint.module.graph
        )


# ---- rewriting -----------------------------------------------------------------------------------
def test_what_a_step_returns_keeps_its_strides() -> None:
    joint = _joint()
    rewriting = Rewriting(joint)
    gradient = rewriting.joint.backward_outputs[-1]
    call = rewriting.builder.call
    with rewriting.graph.inserting_before(rewriting.joint.output):
        rows = call(aten.permute.default, gradient, [1, 0])
        copy = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        other = call(aten.permute.default, copy, [1, 0])
    rewriting.replace(gradient, other, [rewriting.joint.output])
    new = rewriting.finished()
    old, found = (value_of(each.backward_outputs[-1]) for each in (joint, new))
    assert old is not None and found is not None
    assert found.stride() == old.stride() and new.backward_outputs[-1].name != gradient.name
    PassRunner().run(Pass("rewrites", lambda joint: (new, None)), joint)


def test_readers_of_other_strides_are_computed_again() -> None:
    joint = _joint()
    rewriting = Rewriting(joint)
    product = _first(rewriting.joint, aten.mm.default)
    readers, call = list(product.users), rewriting.builder.call
    with rewriting.graph.inserting_before(product.next):
        rows = call(aten.permute.default, product, [1, 0])
        copy = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        other = call(aten.permute.default, copy, [1, 0])
    rewriting.replace(product, other, readers)
    rewrites = Pass("rewrites", lambda joint: (rewriting.finished(), None))
    PassRunner().run(rewrites, joint)


# ---- what is printed -----------------------------------------------------------------------------
def test_the_difference_that_a_pass_makes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    joint = _joint()
    casts = Pass("casts", lambda joint: (_edited(joint, _wrong_dtype), None), after=())
    copies = Pass("copies", lambda joint: (joint.copy(), None))
    with caplog.at_level(logging.DEBUG, logger=runner.__name__):
        PassRunner().run(casts, joint)
        PassRunner().run(copies, joint)  # which changes nothing
    (text,) = (r.getMessage() for r in caplog.records if r.name == runner.__name__)
    assert "--- before casts" in text and "+++ after casts" in text
    assert re.search(r"\n\+  convert_element_type\w*: f64\[8, 6\]", text)


def test_times_of_passes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    running = PassRunner()
    running.run(Pass("copies", lambda joint: (joint.copy(), None)), _joint())
    assert running.seconds["copies"] > 0
    with caplog.at_level(logging.DEBUG, logger=store.__name__):
        store.publish(Report(Outcome()), {"read": 0.5}, {"copies": 0.25})
    assert "planning time: read 0.500 s\n  of it in passes: copies 0.250 s" in caplog.text


def test_what_cannot_be_written_behind_a_region_costs_its_loops() -> None:
    """A value whose op cannot read new strides may be far behind the region that has them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(aten.relu.default, (x,), name=n) for n in "ab")
    last = graph.call_function(
        aten.add.Tensor, (graph.call_function(aten.neg.default, (second,)), x)
    )
    members = [[first.name], [second.name]]
    assert pipeline_stages._holder(second, members) == 1
    assert pipeline_stages._holder(last, members) == 1
    with pytest.raises(ValueError, match="no region"):
        pipeline_stages._holder(x, [["elsewhere"]])
