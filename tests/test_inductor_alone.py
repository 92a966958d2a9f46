"""No plan needs more memory than Inductor alone, nor the free plan much more time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from mstpass import pipeline
from mstpass.graph.joint import JointGraph
from mstpass.memory.simulate_graph import simulate_step
from mstpass.memory.simulate_plan import simulate_plan
from mstpass.options import Options
from mstpass.partition.inductor_alone import inductor_alone
from mstpass.partition.solvers.candidate import Candidate, by_torch
from mstpass.partition.solvers.free_plan import free_plan
from mstpass.partition.solvers.peak_search import peak_search
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import CALL, INPUT
from mstpass.problem.problem import (
    CutProblem,
    Loop,
    LoopResult,
    Mode,
    RegionModes,
    Value,
    loop_name,
    with_needs,
)
from mstpass.problem.saved_set import recomputed, saved_where
from mstpass.problem.verify import verify
from mstpass.torch_internals.aot_autograd import (
    merge_equal_nodes,
    min_cut_rematerialization_partition,
    saved_by_torch,
)
from tests.checks import examples, joint_graph
from tests.models import Attention, Block, GatedMLP
from tests.problems import steps
from tests.test_loops_that_help import _optional
from tests.test_solvers import EXAMPLES

RANDOM = st.randoms(use_true_random=False)


# ---- on plain data -------------------------------------------------------------------------------
@given(problem=steps(forward=12, backward=12, regions=3).map(_optional), random=RANDOM)
@settings(EXAMPLES, max_examples=examples(100))
def test_the_free_plan_is_bounded_in_peak_and_time(problem: CutProblem, random: Any) -> None:
    saved = saved_where(problem, lambda value: random.random() < 0.5)
    problem = dataclasses.replace(problem, torch_saved=tuple(sorted(saved)))
    alone, free = by_torch(problem), free_plan(problem)
    assert alone is not None
    verify(with_modes(problem, free.plan.modes).allowing(True), free.plan.saved)
    assert free.peak_bytes <= alone.peak_bytes
    assert free.us <= (1 + problem.free_overhead) * alone.us
    least = simulate_plan(problem, peak_search(problem, 0))
    assert least.lowered_peak_bytes <= alone.peak_bytes


def _slow_loops(loop_us: float) -> CutProblem:
    """Two wide values; the loops of each, usual and long, take longer than the values alone."""
    values, regions = [Value("x0", 1, kind=INPUT, free=True)], []
    for i in range(2):
        wide, narrow, before = f"wide{i}", f"x{i + 1}", f"x{i}"
        values += [
            Value(wide, 100, (before,), CALL, us=50.0),
            Value(narrow, 1, (wide,), CALL, us=50.0),
        ]
        members, results = (wide, narrow), (LoopResult(narrow, 1),)
        modes = [
            Mode(mode, (Loop(loop_name(narrow), members, (before,), results, size, us),))
            for mode, size, us in (("save", 10, loop_us), ("save, long chunks", 20, 101.0))
        ]
        regions.append(RegionModes(f"r{i}", (*modes, Mode("whole"))))
    return CutProblem(tuple(values), outputs=("x2",), regions=tuple(regions), torch_saved=())


@pytest.mark.parametrize(("loop_us", "mode"), [(101.0, "save"), (104.0, "save, long chunks")])
def test_slow_loops_get_long_chunks(loop_us: float, mode: str) -> None:
    """Within 2 %, as they are; above it, in long chunks, and whole only if these are too slow."""
    problem = _slow_loops(loop_us)
    assert set(_modes(problem)) == {mode}
    assert set(_modes(dataclasses.replace(problem, free_overhead=1.0))) == {"save"}
    assert set(_modes(dataclasses.replace(problem, free_overhead=0.0))) == {"whole"}


def _modes(problem: CutProblem) -> list[str]:
    modes = free_plan(problem).plan.modes
    return [modes.get(region.region, region.modes[0].name) for region in problem.regions]


def test_what_torch_saves_is_among_the_values(tmp_path: Any) -> None:
    values = with_needs([Value("x", 4)], [Value("t", 4)], ())
    problem = CutProblem(values, torch_saved=("x",))
    problem.to_json(tmp_path / "problem.json")
    assert CutProblem.from_json(tmp_path / "problem.json") == problem
    with pytest.raises(ValueError, match="not among the values"):
        CutProblem(values, torch_saved=("y",))


# ---- torch's partitioner -------------------------------------------------------------------------
Joint = tuple[fx.GraphModule, int]


def _layers() -> Joint:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(32, Attention(32, 4)), Block(32, GatedMLP(32, 128, "silu")))
    x = torch.randn(1, 128, 32, requires_grad=True)
    return joint_graph(lambda x: model(x).sin().sum(), x)


def _sigmoid_loss_of_pairs() -> Joint:
    """Of two cuts with equal bytes, one saves a product, which is there in any case."""
    x, y = (torch.randn(384, 16, requires_grad=True) for _ in range(2))

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = 10 * F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).t() - 10
        return -F.logsigmoid((2 * torch.eye(384) - 1) * logits).sum() / 384

    return joint_graph(loss, x, y)


@pytest.mark.parametrize("make", [_layers, _sigmoid_loss_of_pairs])
def test_torch_s_choice_is_found_without_its_graphs(make: Any) -> None:
    module, outputs = make()
    merge_equal_nodes(module)
    before = str(module.graph)
    joint = JointGraph(module, outputs)
    names = saved_by_torch(joint.copy().module, outputs)
    alone = inductor_alone(joint)
    assert str(module.graph) == before
    modules = min_cut_rematerialization_partition(module, None, num_fwd_outputs=outputs)
    returned: Any = modules[0].graph.output_node().args[0]
    assert names == [node.name for node in returned[outputs:]]
    assert isinstance(alone, Candidate)
    again = recomputed(alone.problem.allowing(True), alone.plan.saved)
    assert not [name for name in again if name.startswith(("mm", "addmm"))]


@pytest.mark.parametrize("options", [{}, {"chunk": "off"}, {"chunk_tokens": 32}], ids=str)
def test_pairs_need_no_more_than_under_inductor(options: dict[str, Any]) -> None:
    module, outputs = _sigmoid_loss_of_pairs()
    found = pipeline.run(module, Options(**options), num_fwd_outputs=outputs).outcome
    modules = min_cut_rematerialization_partition(module, None, num_fwd_outputs=outputs)
    alone = simulate_step(modules[0].graph, modules[1].graph).peak_bytes
    assert found.peak_bytes is not None and found.peak_bytes <= 1.005 * alone
    assert found.baseline_peak_bytes == pytest.approx(alone, rel=0.01)


def test_where_torch_s_partitioner_fails_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> list[str]:
        raise ValueError("no cut")

    monkeypatch.setattr("mstpass.partition.inductor_alone.saved_by_torch", fails)
    module, outputs = _layers()
    found = pipeline.run(module, Options(), num_fwd_outputs=outputs).outcome
    (note,) = found.notes
    assert "ValueError: no cut" in note and "compared with the step without loops" in note
    assert found.peak_bytes is not None and found.baseline_peak_bytes is not None
