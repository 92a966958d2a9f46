"""Steps that write to buffers or inputs: mstpass splits them, budgets hold, values are eager's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import mstpass
from mstpass import pipeline
from mstpass.graph.joint import JointGraph
from mstpass.graph.recompute_rules import BEFORE_WRITE, is_input_write, unproven_write
from mstpass.memory.simulate_graph import op_of
from mstpass.options import Options
from mstpass.partition.split import needs_torch
from mstpass.problem.op import REALIZED
from tests import buffer_models as models
from tests.checks import compiled, joint_graph

pytestmark = pytest.mark.sampled(6)

N = 64
aten = torch.ops.aten
MODELS: dict[str, Callable[[], nn.Module]] = {
    "counter": models.Counter,
    "running statistics": models.RunningStatistics,
    "moving average": models.MovingAverage,
    "center": models.Center,
    "router bias": models.RouterBias,
    "temperature": models.Temperature,
    "old temperature": lambda: models.Temperature(old=True),
    "written input": models.WrittenInput,
}


def _inputs(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x_ND = torch.randn(N, models.D, requires_grad=True)
    inputs = [x_ND, torch.randint(models.VOCABULARY, (N,))]
    return [*inputs, torch.randn(N, models.D)] if isinstance(model, models.WrittenInput) else inputs


def _values(
    make: Callable[[], nn.Module],
    compile_: Callable[[nn.Module], Any] = lambda model: model,
    steps: int = 3,
    accumulate: bool = False,
) -> list[Tensor]:
    """Loss, gradients and what was written, after each of some steps."""
    torch.manual_seed(0)
    model = make()
    inputs, found, step = _inputs(model), [], compile_(model)
    for _ in range(steps):
        if not accumulate:
            model.zero_grad(set_to_none=True)
            inputs[0].grad = None
        torch.manual_seed(5)
        loss = step(*inputs)
        loss.backward()
        leaves = [*model.parameters(), inputs[0]]
        found += [loss.detach(), *(p.grad.clone() for p in leaves if p.grad is not None)]
        found += [value.clone() for value in (*model.buffers(), *inputs[2:])]
    return found


def _run(joint: JointGraph, **options: Any) -> pipeline.Result:
    given = Options.parse({"strict": True, **options}, environ={})
    return pipeline.run(joint.module, given, num_fwd_outputs=joint.num_fwd_outputs)


def _traced(make: Callable[[], nn.Module]) -> JointGraph:
    model = make()
    return JointGraph(*joint_graph(model, *_inputs(model)))


# ---- values ------------------------------------------------------------------------------------
@pytest.mark.op_by_op
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *((name, 0.0) for name in MODELS),
        ("router bias", "free"),
        ("written input", "free"),
        *(pytest.param(name, b, marks=pytest.mark.full) for name in MODELS for b in ("free", 0.5)),
    ],
)
def test_gradients_and_buffers_are_eager_s(name: str, budget: Any) -> None:
    def compile_(model: nn.Module) -> Any:
        return compiled(model, memory_budget=budget, chunk_tokens=16)

    found = _values(MODELS[name], compile_)
    torch.testing.assert_close(found, _values(MODELS[name]), rtol=1e-4, atol=1e-6)
    report = mstpass.reports()[-1]
    assert report.outcome.save_plan is not None and report.outcome.save_plan.solver == "peak_search"
    assert report.regions and not report.outcome.left_to_torch and not report.outcome.notes


@pytest.mark.op_by_op
def test_accumulated_gradients() -> None:
    make = MODELS["router bias"]
    found = _values(make, lambda model: compiled(model, memory_budget=0.0), accumulate=True)
    torch.testing.assert_close(found, _values(make, accumulate=True), rtol=1e-4, atol=1e-6)


@pytest.mark.op_by_op
def test_two_forwards_before_their_backwards() -> None:
    """Each backward has the values of its own forward, whatever a later one has written."""

    def results(step: Any, model: nn.Module) -> list[Tensor]:
        inputs = _inputs(model)
        losses = [step(*inputs), step(*inputs)]
        for loss in reversed(losses):
            loss.backward()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return models.Temperature(old=True)

    eager, ours = made(), made()
    found = results(compiled(ours, memory_budget=0.0, chunk_tokens=16), ours)
    torch.testing.assert_close(found, results(eager, eager), rtol=1e-4, atol=1e-6)


@pytest.mark.op_by_op
def test_symbolic_lengths() -> None:
    model, right = models.RouterBias(), models.RouterBias()
    right.load_state_dict(model.state_dict())
    step = torch.compile(
        model, backend="mst", dynamic=True, options={"strict": True, "memory_budget": 0.0}
    )
    for length in (64, 96, 33):
        x, labels = torch.randn(length, models.D), torch.randint(models.VOCABULARY, (length,))
        step(x, labels).backward()
        right(x, labels).backward()
    pairs = zip(model.parameters(), right.parameters(), strict=True)
    found, wanted = zip(*((mine.grad, theirs.grad) for mine, theirs in pairs), strict=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(list(model.buffers()), list(right.buffers()))
    assert not mstpass.reports()[-1].outcome.left_to_torch


@pytest.mark.op_by_op
def test_dropout_is_inductor_s_beside_a_counter() -> None:
    def values(backend: str) -> list[Tensor]:
        torch.compiler.reset()
        options = {"strict": True, "memory_budget": 0.0} if backend == "mst" else None
        return _values(
            models.DropoutAndCounter,
            lambda model: torch.compile(model, backend=backend, options=options),
        )

    torch.testing.assert_close(values("mst"), values("inductor"), rtol=1e-4, atol=1e-6)


@pytest.mark.op_by_op
def test_what_is_returned_after_it_was_written() -> None:
    class Returned(models.Counter):
        def forward(self, x_ND: Tensor, labels: Tensor) -> Any:
            loss = super().forward(x_ND, labels)
            return loss, self.seen, self.seen.view(1)

    model = Returned()
    step = compiled(model, memory_budget=0.0)
    for number in (1, 2):
        loss, seen, view = step(*_inputs(model))
        loss.backward()
        assert seen.item() == view.item() == model.seen.item() == number
        assert view.data_ptr() == model.seen.data_ptr()


# ---- graphs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_each_write_is_in_the_forward_once(name: str) -> None:
    joint = _traced(MODELS[name])
    result = _run(joint, memory_budget=0.0, chunk_tokens=16)
    assert result.modules is not None
    forward, backward = (module.graph for module in result.modules)
    writes = [node for node in forward.nodes if is_input_write(node)]
    written = [write.args[0].target for write in writes]  # type: ignore[union-attr]
    assert written == [write.args[0].target for write in joint.forward_writes] and written
    order = {node: i for i, node in enumerate(forward.nodes)}
    for write in writes:
        (value, *_) = write.all_input_nodes
        assert max(map(order.__getitem__, value.users)) == order[write], "it is read before"
    inputs = {node.target for node in backward.find_nodes(op="placeholder")}
    assert inputs.isdisjoint(written), "the backward does not see what was written"
    for graph in (forward, backward):
        assert not graph.find_nodes(op="call_function", target=BEFORE_WRITE)
    assert not any(is_input_write(node) for node in backward.nodes)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.0}])
def test_a_counter_costs_nothing(options: dict[str, Any]) -> None:
    makes = (models.Counter, models.Model)
    with_counter, without = (_run(_traced(make), **options) for make in makes)
    assert with_counter.memory is not None and without.memory is not None
    assert with_counter.memory.peak_bytes - without.memory.peak_bytes in range(65)
    assert with_counter.problem is not None
    assert with_counter.outcome.extra_time == pytest.approx(without.outcome.extra_time, rel=0.01)


def test_a_write_takes_no_memory() -> None:
    joint = _traced(models.MovingAverage)
    (write,) = joint.forward_writes
    op = op_of(write)
    assert (op.kind, op.bytes) == (REALIZED, 0)
    assert write in joint.forward and write not in joint.backward


# ---- what is refused ---------------------------------------------------------------------------
@pytest.mark.op_by_op
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_a_write_of_the_backward_is_left_to_torch() -> None:
    make = models.BackwardCounter
    found = _values(make, lambda model: compiled(model, memory_budget=0.0))
    torch.testing.assert_close(found, _values(make), rtol=1e-4, atol=1e-6)
    report = mstpass.reports()[-1]
    assert "the backward writes to an input" in report.outcome.left_to_torch
    lines = str(report).splitlines()
    head = next(i for i, line in enumerate(lines) if "torch's partitioner" in line)
    assert head < next(i for i, line in enumerate(lines) if "in chunks" in line)


@pytest.mark.op_by_op
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_backwards_read_what_an_earlier_one_has_written() -> None:
    """The largest gradient so far, of two losses whose backwards run after both forwards."""

    def largest(wrap: Callable[[Any], Any]) -> Tensor:
        torch.manual_seed(0)
        seen, weight = torch.zeros(()), torch.randn(8, requires_grad=True)
        step = wrap(lambda weight, seen: models.LargestGradient.apply(weight, seen).sum())
        losses = [step(weight, seen) for _ in range(2)]
        (losses[0] * 2).backward()
        losses[1].backward()
        return seen

    assert largest(lambda step: step).item() == 2
    assert largest(lambda step: compiled(step)).item() == 2


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_a_budget_that_is_not_met_names_the_cause() -> None:
    def warning(make: Callable[[], nn.Module]) -> str:
        joint = _traced(make)
        with pytest.warns(UserWarning, match="cannot be met") as caught:
            _run(joint, memory_budget=1000, strict=False)
        return str(caught[0].message)

    cause = "torch's partitioner chose what is saved, without a budget: the backward writes"
    assert cause in warning(models.BackwardCounter)
    assert "torch's partitioner" not in warning(models.Counter)


def _changed(change: Callable[[fx.Graph, fx.Node], None]) -> JointGraph:
    """A step that multiplies by a buffer and then writes to it, its graph changed by hand."""

    def step(weight: Tensor, scratch: Tensor) -> Tensor:
        loss = (weight * scratch.exp()).sum()
        scratch.mul_(0.5)
        return loss

    module, outputs = joint_graph(step, torch.randn(8, requires_grad=True), torch.randn(8))
    (write,) = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    change(module.graph, write)
    return JointGraph(module, outputs)


def _read_later(graph: fx.Graph, write: fx.Node) -> None:
    with graph.inserting_after(write):
        graph.call_function(aten.sin.default, (write.args[0],)).meta = dict(write.meta)


def _read_later_through_a_view(graph: fx.Graph, write: fx.Node) -> None:
    with graph.inserting_before(write):
        view = graph.call_function(aten.view.default, (write.args[0], [2, 4]))
    with graph.inserting_after(write):
        later = graph.call_function(aten.sin.default, (view,))
    view.meta, later.meta = dict(write.meta), dict(write.meta)


def _read_from_the_result(graph: fx.Graph, write: fx.Node) -> None:
    with graph.inserting_after(write):
        graph.call_function(aten.sin.default, (write,)).meta = dict(write.meta)


def _write_to_a_value(graph: fx.Graph, write: fx.Node) -> None:
    (value,) = (n for n in write.all_input_nodes if n.op != "placeholder")
    write.args = (value, write.args[0])


def _another_op(graph: fx.Graph, write: fx.Node) -> None:
    write.target = aten.add_.Tensor


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read_later, "reads .* after copy_ has written to it"),
        (_read_later_through_a_view, "reads .* after copy_ has written to it"),
        (_read_from_the_result, "reads .* after copy_ has written to it"),
        (_write_to_a_value, "copy_ writes to its operands"),
        (_another_op, "copy_ writes to its operands"),
    ],
)
def test_other_writes_are_refused(change: Any, reason: str) -> None:
    assert re.search(reason, unproven_write(_changed(change)))
    assert re.search(reason, needs_torch(_changed(change)))
    assert not unproven_write(_changed(lambda *_: None))


# ---- kernels -----------------------------------------------------------------------------------
@pytest.mark.full
def test_a_budget_in_bytes_is_met_beside_a_counter() -> None:
    """Measured by Inductor's schedule; the simulated peak is the same to a few percent."""
    torch.manual_seed(0)
    model = models.Counter(layers=3)
    x, labels = torch.randn(512, models.D), torch.randint(models.VOCABULARY, (512,))
    free = mstpass.explain(model, x, labels).peak_bytes
    assert free is not None
    budget = int(0.55 * free)
    step = compiled(model, memory_budget=budget)
    step(x, labels).backward()
    outcome = mstpass.reports()[-1].outcome
    assert outcome.scheduled_peak_bytes is not None and outcome.peak_bytes is not None
    assert outcome.scheduled_peak_bytes <= budget
    assert outcome.peak_bytes == pytest.approx(outcome.scheduled_peak_bytes, rel=0.03)
    assert model.seen.item() == 1


@pytest.mark.op_by_op
def test_writes_in_checkpoints_are_made_once() -> None:
    """Eager mode writes again when it recomputes a block; torch's compiled step does not."""

    def values(backend: str) -> list[Tensor]:
        torch.compiler.reset()
        options = {"strict": True, "memory_budget": 0.0} if backend == "mst" else None
        return _values(
            models.InCheckpoints,
            lambda model: torch.compile(model, backend=backend, options=options),
            steps=1,
        )

    torch.testing.assert_close(values("mst"), values("inductor"), rtol=1e-4, atol=1e-6)
