"""A pass or another part of a stage that fails costs what it makes, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

import mstpass
from mstpass import inductor_hooks, normalize, pipeline, pipeline_stages
from mstpass.errors import told
from mstpass.explainer import plan_step
from mstpass.graph.graph_text import graph_text
from mstpass.graph.joint import JointGraph
from mstpass.loops import candidate_modes
from mstpass.loops.body import build
from mstpass.normalize.plain_values import overwritten_inputs
from mstpass.options import Options
from mstpass.partition import reconstruct
from mstpass.passes import runner
from mstpass.passes.runner import InPlacePass, Pass, PassError, PassRunner
from mstpass.regions import detect
from tests.checks import joint_graph
from tests.test_faults import _quickly, loss, told_by_a_right_step  # noqa: F401

LEAST = Options(memory_budget=0.0, chunk_tokens=64)
BOTH = [("lm_head", "fused"), ("mlp", "recompute")]
LISTS = ("READ", "SIZES", "TOKENS", "FOR_SECTIONS", "HEADS", "ROWS")
PASSES: dict[str, tuple[Any, str]] = {
    **{step.name: (normalize, name) for name in LISTS for step in getattr(normalize, name)},
    "masks_as_flags": (pipeline, "MASKS"),
    "reconstruct": (reconstruct, "RECONSTRUCT"),
    "apply_plans": (pipeline_stages, "APPLY_PLANS"),
}
ONLY_WITH_ATTENTION = ("expand_to_rows", "gradients_in_parts")
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def in_production(monkeypatch: Patch) -> None:
    monkeypatch.setattr(runner, "LEAST", runner.OFF)


def _fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("on purpose")


@pytest.fixture
def broken(monkeypatch: Patch) -> Callable[[str], None]:
    """Make the pass of a name fail, wherever it runs."""
    run = PassRunner.run_alone

    def break_one(name: str) -> None:
        def instead(self: PassRunner, step: Pass, *args: Any, **kwargs: Any) -> Any:
            step = dataclasses.replace(step, run=_fails) if step.name == name else step
            return run(self, step, *args, **kwargs)

        monkeypatch.setattr(PassRunner, "run_alone", instead)

    return break_one


@pytest.fixture(scope="module")
def step() -> tuple[fx.GraphModule, int]:
    leaves = [torch.randn(*size, requires_grad=True) for size in ((256, 16), (16, 96))]
    return joint_graph(loss, *leaves)


def _kinds(outcome: Any) -> list[tuple[str, str]]:
    return [(region.kind, region.mode) for region in outcome.regions]


# ---- passes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in PASSES if name not in ONLY_WITH_ATTENTION])
def test_a_pass_that_fails_is_left_out(
    name: str, step: tuple[fx.GraphModule, int], broken: Callable[[str], None]
) -> None:
    broken(name)
    module, outputs = step
    if name == "row_sums_of_gradients":  # of regions without sections
        outcome = pipeline.run(module, LEAST, num_fwd_outputs=outputs).outcome
        assert _kinds(outcome) == BOTH
        return
    with pytest.warns(UserWarning, match=f"the pass {name} is refused") as warned:
        outcome = pipeline.run(module, LEAST, num_fwd_outputs=outputs).outcome
    assert len(warned) == 1 and "planned the rest of it" in str(warned[0].message)
    assert _kinds(outcome) == ([] if name == "apply_plans" else BOTH)
    (refusal,) = (r for r in outcome.rejections if r.stage == "error")
    assert "test_failing_parts.py" not in refusal.reason, "the line is ours"
    assert "ZeroDivisionError: on purpose" in refusal.reason and refusal.fix
    strict = dataclasses.replace(LEAST, strict=True)
    with pytest.raises(PassError, match=f"the pass {name} is refused: .*: on purpose"):
        pipeline.run(module, strict, num_fwd_outputs=outputs)


@pytest.mark.parametrize("name", ["values_by_axis", "masks_as_flags", "apply_plans", "reconstruct"])
def test_gradients_are_right_without_a_pass(name: str, broken: Callable[[str], None]) -> None:
    broken(name)
    (text,) = told_by_a_right_step()
    assert f"the pass {name} is refused" in text
    assert text.split("refused: ")[1].split(".")[0] in str(mstpass.reports()[-1])


def test_a_pass_that_a_graph_needs_is_not_left_out(broken: Callable[[str], None]) -> None:
    """Backward would read what the step has written."""

    def writes(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        result = (x + buffer).sin()
        buffer.add_(1)
        return result.sum()

    joint = JointGraph(*joint_graph(writes, torch.randn(8, requires_grad=True), torch.ones(8)))
    if not overwritten_inputs(joint):
        pytest.skip("this torch does not say what is written")
    broken("inputs_before_writes")
    with pytest.raises(PassError, match="cannot be left out"):
        pipeline.run(joint.module, LEAST, num_fwd_outputs=joint.num_fwd_outputs)


def test_one_loop_that_cannot_be_written_costs_itself(
    step: tuple[fx.GraphModule, int], monkeypatch: Patch
) -> None:
    apply_plans = pipeline_stages.apply_plans

    def fails_for_mlps(joint: JointGraph, plans: Any) -> Any:
        if any(plan.kind == "mlp" for plan in plans):
            raise ZeroDivisionError("on purpose")
        return apply_plans(joint, plans)

    monkeypatch.setattr(pipeline_stages, "apply_plans", fails_for_mlps)
    with pytest.warns(UserWarning, match="the pass apply_plans is refused"):
        outcome = pipeline.run(step[0], LEAST, num_fwd_outputs=step[1]).outcome
    assert _kinds(outcome) == BOTH[:1]


def test_sizes_that_torch_cannot_compare_refuse_a_region(
    step: tuple[fx.GraphModule, int], monkeypatch: Patch
) -> None:
    def guards(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Could not guard on data-dependent expression Eq(s0*(s1 - 1), 4*s2)")

    monkeypatch.setattr(build, "chunk_call", guards)
    outcome = pipeline.run(step[0], LEAST, num_fwd_outputs=step[1], stop_after="plan").outcome
    assert not outcome.regions
    assert all("Eq(s0*(s1 - 1), 4*s2)" in refusal.reason for refusal in outcome.rejections)
    assert {refusal.stage for refusal in outcome.rejections} == {"apply"}


# ---- finished graphs -----------------------------------------------------------------------------
def test_a_finished_graph_is_as_it_was(step: tuple[fx.GraphModule, int]) -> None:
    joint = JointGraph(*step).copy()
    graph, before = joint.module.graph, graph_text(joint.module)

    def fails_late(graph: fx.Graph) -> None:
        graph.output_node().args = ((),)
        graph.eliminate_dead_code()
        raise ZeroDivisionError("on purpose")

    running = PassRunner()
    assert running.run_in_place(InPlacePass("late", fails_late), graph) is None
    assert graph_text(joint.module) == before
    (refusal,) = running.refused
    assert refusal.stage == "error" and "the pass late is refused" in refusal.reason
    with pytest.raises(PassError, match="the pass late"):
        PassRunner(strict=True).run_in_place(InPlacePass("late", fails_late), graph)


@pytest.mark.parametrize("name", ["delay_scatters", "_wait", "materialize_masks"])
def test_a_pass_over_finished_graphs_costs_itself(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(inductor_hooks, name, _fails)
    (text,) = told_by_a_right_step()
    assert "is refused" in text and "on purpose" in str(mstpass.reports()[-1])
    assert len(mstpass.reports()[-1].regions) == 2
    with pytest.raises(Exception, match="on purpose"):
        told_by_a_right_step(strict=True)


# ---- other parts of stages -----------------------------------------------------------------------
def _of_one(module: Any, name: str, is_hit: Callable[..., bool]) -> Callable[..., Any]:
    real = getattr(module, name)
    return lambda *args, **kwargs: (_fails if is_hit(*args) else real)(*args, **kwargs)


def _is_mlp_anchor(growth: Any) -> bool:
    return growth.anchor.meta["val"].shape[-1] == 96


PARTS = (
    (detect, "_region", _is_mlp_anchor, "detection of a region", BOTH[:1]),
    (
        candidate_modes,
        "_candidates",
        lambda planner, *_: planner.region.kind == "lm_head",
        "planning of a region's loops",
        BOTH[1:],
    ),
    (candidate_modes, "attention_candidates", lambda *_: True, "detection of attention", BOTH),
    (pipeline_stages, "reasons_left_whole", lambda *_: True, "why regions stay whole", BOTH),
)


@pytest.mark.parametrize(("module", "name", "is_hit", "what", "left"), PARTS)
def test_a_part_of_a_stage_costs_itself(
    module: Any,
    name: str,
    is_hit: Callable[..., bool],
    what: str,
    left: list[tuple[str, str]],
    step: tuple[fx.GraphModule, int],
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(module, name, _of_one(module, name, is_hit))
    with pytest.warns(UserWarning, match=what) as warned:
        outcome = pipeline.run(step[0], LEAST, num_fwd_outputs=step[1]).outcome
    assert len(warned) == 1
    assert set(_kinds(outcome)) == set(left)
    refusal = next(r for r in outcome.rejections if r.stage == "error")
    assert what in refusal.reason and "on purpose" in refusal.reason
    with pytest.raises(PassError, match=what):
        pipeline.run(step[0], dataclasses.replace(LEAST, strict=True), num_fwd_outputs=step[1])


def test_the_picture_of_a_step_costs_itself(monkeypatch: Patch) -> None:
    monkeypatch.setattr(plan_step, "collect_details", _fails)
    leaves = [torch.randn(*size, requires_grad=True) for size in ((256, 16), (16, 96))]
    options = {"memory_budget": 0.0, "chunk_tokens": 64}
    report = mstpass.explain(loss, *leaves, options=options)
    assert len(report.regions) == 2 and report.details is None and "on purpose" in str(report)


# ---- how a failure is told -----------------------------------------------------------------------
def test_an_error_is_told_with_the_line_that_raised_it() -> None:
    def raised() -> Iterator[Exception]:
        for error in (AssertionError(), ValueError("a message")):
            try:
                raise error
            except Exception as caught:
                yield caught

    bare, with_message = raised()
    assert told(bare).startswith("test_failing_parts.py:") and told(bare).endswith("AssertionError")
    assert told(with_message).endswith(": ValueError: a message")
