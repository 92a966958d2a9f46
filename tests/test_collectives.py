"""Graphs with collectives: their split, their order, and heads that need numbers of all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from mstpass import normalize, pipeline
from mstpass.graph import ops
from mstpass.graph.collectives import is_collective, is_pending, is_wait
from mstpass.graph.joint import JointGraph
from mstpass.graph.loop_op import mst_loop
from mstpass.loops.lowering import lower_loops
from mstpass.memory.simulate_graph import simulate_step
from mstpass.normalize.indexing import index_by_token
from mstpass.normalize.sums_over_tokens import local_sums
from mstpass.options import Options
from mstpass.partition.build_problem import cut_problem
from mstpass.partition.split import needs_torch
from mstpass.problem.problem import MIXED
from mstpass.torch_internals.graphs import is_opaque
from mstpass.torch_internals.versions import has_release
from tests.checks import check_against_float64, joint_graph
from tests.models import MLPS

pytestmark = [
    pytest.mark.op_by_op,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]
N, D, VOCABULARY = 256, 32, 1024
aten = torch.ops.aten


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Two ranks of which only this one runs: its collectives exchange nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def head(mesh: Any) -> JointGraph:
    """The joint graph of a head under ``loss_parallel``."""
    from torch.distributed.tensor.parallel import loss_parallel

    from tests.ranks.parallel_cases import Head

    model, labels = Head(mesh), torch.randint(VOCABULARY, (N,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(x), labels).to_local()  # type: ignore[attr-defined]

    with loss_parallel():
        return JointGraph(*joint_graph(loss, torch.randn(N, D, requires_grad=True)))


@pytest.fixture(scope="module")
def mlp(mesh: Any) -> JointGraph:
    """The joint graph of two MLPs that are sharded by columns and rows."""
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.ranks.parallel_cases import _mlp_plan, blocks

    model = blocks()
    for block in model:
        parallelize_module(block.mlp, mesh, _mlp_plan())
    x = torch.randn(2, N // 2, D, requires_grad=True)
    return JointGraph(*joint_graph(lambda x: model(x).sin().mean(), x))


def _run(joint: JointGraph, **options: Any) -> pipeline.Result:
    given = Options.parse({"strict": True, "chunk_tokens": 64, **options}, environ={})
    return pipeline.run(joint.module, given, num_fwd_outputs=joint.num_fwd_outputs)


def _collectives(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if is_collective(node)]


# ---- the split -----------------------------------------------------------------------------------
def test_meshes_and_collectives_are_split_by_us(mlp: JointGraph, head: JointGraph) -> None:
    for joint in (mlp, head):
        assert any(map(is_collective, joint.nodes))
        assert not needs_torch(joint)
        result = _run(joint)
        assert result.outcome.save_plan is not None and result.outcome.save_plan.solver != "torch"


def test_opaque_inputs_cost_nothing_and_are_not_saved(mlp: JointGraph) -> None:
    opaque = [node.name for node in mlp.nodes if is_opaque(node)]
    problem = cut_problem(mlp)
    values = {v.name: v for v in (*problem.values, *problem.backward)}
    assert all(values[name].free and not values[name].bytes for name in opaque)
    result = _run(mlp)
    assert result.outcome.save_plan is not None
    assert not {v.node for v in result.outcome.save_plan.saved} & set(opaque)


def test_pending_results_do_not_cross_and_waits_share_their_memory(mlp: JointGraph) -> None:
    problem = cut_problem(mlp)
    values = {v.name: v for v in problem.values}
    for node in mlp.nodes:
        if node.name in values and is_pending(node):
            assert values[node.name].pinned and not values[node.name].savable
        if node.name in values and is_wait(node):
            assert values[node.name].savable and values[node.name].kind == "view"


@pytest.mark.parametrize(
    "options", [{}, {"memory_budget": 0.0}, {"chunk": "off"}, {"solver": "recompute_all"}]
)
def test_every_collective_runs_once_in_the_traced_order(
    mlp: JointGraph, head: JointGraph, options: dict[str, Any]
) -> None:
    for joint in (mlp, head):
        result = _run(joint, repeat_collectives="off", **options)
        assert result.modules is not None
        forward, backward = (_collectives(module.graph) for module in result.modules)
        assert [*forward, *backward] == _collectives(joint.module.graph)
        in_backward = [n.name for n in joint.nodes if is_collective(n) and n in joint.backward]
        assert backward == in_backward


@pytest.mark.parametrize("budget", ["free", 0.0])
def test_a_collective_that_nothing_reads_keeps_its_place(mesh: Any, budget: Any) -> None:
    """Else ranks that read its result would exchange in another order."""
    import torch.distributed._functional_collectives as funcol

    group = torch.distributed.group.WORLD

    def loss(x: torch.Tensor) -> torch.Tensor:
        first = funcol.all_reduce(x.sin(), "sum", group)
        funcol.all_gather_tensor(x.cos(), 0, group)
        second = funcol.all_reduce(first.exp(), "sum", group)
        return (x * second).sin().sum()

    joint = JointGraph(*joint_graph(loss, torch.randn(N, D, requires_grad=True)))
    traced = [n.name for n in joint.nodes if is_collective(n) and n not in joint.backward]
    assert len(traced) == 3
    result = _run(joint, memory_budget=budget)
    assert result.modules is not None
    assert _collectives(result.modules[0].graph) == traced


class Ulysses(nn.Module):
    """Checkpointed blocks on a part of the sequence; an all-to-all before and after attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.mlps = nn.ModuleList(MLPS["gelu"](D) for _ in range(2))

    def block(self, i: int, x_BSD: torch.Tensor) -> torch.Tensor:
        parts = self.qkv[i](x_BSD).unflatten(-1, (3, 2, 2, -1)).permute(2, 0, 3, 4, 1, 5)
        q, k, v = (_to_heads(part) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out[i](_to_tokens(mixed))
        return x_BSD + self.mlps[i](x_BSD)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            x_BSD = checkpoint(partial(self.block, i), x_BSD, use_reentrant=False)
        return x_BSD.sin().mean()


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    import torch.distributed._functional_collectives as funcol

    received: torch.Tensor = funcol.all_to_all_single_autograd(
        x, None, None, torch.distributed.group.WORLD
    )
    return received


def _to_heads(x_BRhSD: torch.Tensor) -> torch.Tensor:
    """All heads of a rank's tokens to its heads of all tokens: [B, h, R S, D]."""
    sent = x_BRhSD.permute(1, 3, 0, 2, 4).contiguous()
    received = _exchanged(sent)
    return received.flatten(0, 1).permute(1, 2, 0, 3)


def _to_tokens(x_BhSD: torch.Tensor) -> torch.Tensor:
    """A rank's heads of all tokens to all heads of its tokens: [B, S, R h D]."""
    sent = x_BhSD.permute(2, 0, 1, 3).unflatten(0, (2, -1)).contiguous()
    received = _exchanged(sent)
    return received.permute(2, 1, 0, 3, 4).flatten(2)


def test_plans_are_valid_where_a_checkpoint_repeats_a_collective(mesh: Any) -> None:
    """A loop that reads a collective's result through a view keeps it inside of the checkpoint."""
    joint = JointGraph(*joint_graph(Ulysses(), torch.randn(2, N // 2, D, requires_grad=True)))
    free, least = (_run(joint, chunk_tokens=None, memory_budget=b) for b in ("free", 0.0))
    assert least.outcome.save_plan is not None and least.memory is not None
    assert all("times as long" in note for note in least.outcome.notes)
    assert least.outcome.save_plan.solver == "peak_search"
    if has_release("2.12"):  # in the graph of 2.11 the plan of least memory has no loops
        assert ("attention", "recompute") in {(r.kind, r.mode) for r in least.outcome.regions}
    assert free.memory is not None and least.memory.peak_bytes < free.memory.peak_bytes
    assert least.modules is not None
    assert len(_collectives(least.modules[1].graph)) > len(_collectives(joint.module.graph)) / 2


def test_no_loop_holds_a_collective(head: JointGraph) -> None:
    result = _run(head)
    assert result.joint is not None
    for module in result.joint.children():
        assert not _collectives(module.graph)  # type: ignore[arg-type]


def test_the_simulated_peaks_of_plan_and_graphs_are_equal(mlp: JointGraph) -> None:
    for options in ({"chunk": "off"}, {"memory_budget": 0.0, "chunk": "off"}):
        result = _run(mlp, **options)
        assert result.modules is not None and result.memory is not None
        forward, backward = (module.graph for module in result.modules)
        assert simulate_step(forward, backward).peak_bytes == result.memory.peak_bytes


# ---- heads ---------------------------------------------------------------------------------------
def test_a_sharded_head_is_two_loops(head: JointGraph) -> None:
    (region,) = _run(head).outcome.regions
    assert (region.kind, region.mode, len(region.loops)) == ("lm_head", "fused", 2)
    first, second = region.loops
    assert len(first.outputs) == 3 and "computed more than once" in region.note
    read = {item.node for item in second.inputs}
    assert any(is_wait(head.by_name[name]) for name in read if name in head.by_name)


@pytest.mark.usefixtures("mixed_solver")
def test_the_weights_of_a_share_have_sections(head: JointGraph) -> None:
    (region,) = _run(head, solver="mixed", memory_budget=0.5).outcome.regions
    *rounds, sections = region.loops
    assert region.mode == MIXED and [loop.cut.axis for loop in rounds] == ["tokens"] * 2
    assert (sections.phase, sections.cut.axis) == ("backward", "features")
    assert sections.cut.total == VOCABULARY // 2
    assert all(output.spec is not None for output in sections.outputs), "a sum over sections"


def test_without_local_sums_it_is_three(head: JointGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(step for step in normalize.TOKENS if step.name != "local_sums")
    assert len(others) < len(normalize.TOKENS)
    monkeypatch.setattr(normalize, "TOKENS", others)
    (region,) = _run(head).outcome.regions
    assert len(region.loops) == 3


def test_only_sums_that_the_ranks_add_up_are_rewritten(head: JointGraph) -> None:
    _, changed = local_sums(head)
    assert {name for name in changed if name.startswith("all_reduce")} == {"all_reduce_1"}

    def alone(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logits = x @ w
        return (logits - logits.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).log().sum()

    tensors = [torch.randn(N, D, requires_grad=True), torch.randn(D, VOCABULARY)]
    joint = JointGraph(*joint_graph(alone, *tensors))
    assert local_sums(joint) == (joint, frozenset())


def test_a_wide_value_is_not_exchanged_in_chunks(mesh: Any) -> None:
    import torch.distributed._functional_collectives as funcol

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logits = funcol.all_reduce(x @ w, "sum", torch.distributed.group.WORLD)
        return torch.logsumexp(logits, -1).sum()

    x = torch.randn(N, D)
    joint = JointGraph(*joint_graph(loss, x, torch.randn(D, VOCABULARY, requires_grad=True)))
    outcome = _run(joint).outcome
    assert not outcome.regions
    assert any("in step with the other ranks" in r.reason for r in outcome.rejections)
    assert all(r.fix for r in outcome.rejections)


# ---- indexing with the tokens' numbers -----------------------------------------------------------
class Picked(nn.Module):
    """A loss that picks the label's logit by indexing."""

    def __init__(self, rows: Callable[[], torch.Tensor] = lambda: torch.arange(N)):
        super().__init__()
        self.head, self.rows = nn.Linear(D, VOCABULARY), rows

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -F.log_softmax(self.head(x), -1)[self.rows(), labels].mean()


def test_picking_by_the_tokens_numbers_runs_in_chunks() -> None:
    torch.manual_seed(0)
    labels = torch.randint(-VOCABULARY, VOCABULARY, (N,))  # also from the end
    inputs = [torch.randn(N, D, requires_grad=True), labels]
    report = check_against_float64(Picked(), lambda m: m.forward, inputs, chunk_tokens=64)
    assert [region.kind for region in report.regions] == ["lm_head"], report


@pytest.mark.parametrize(
    "rows", [lambda: torch.arange(N).flip(0), lambda: torch.arange(1, N + 1) - 1]
)
def test_other_numbers_are_left_alone(rows: Callable[[], torch.Tensor]) -> None:
    x, labels = torch.randn(N, D, requires_grad=True), torch.randint(VOCABULARY, (N,))
    joint = JointGraph(*joint_graph(Picked(rows).forward, x, labels))
    assert index_by_token(joint) == (joint, frozenset())


def test_what_inductor_writes_in_place_is_no_operand_of_a_loop(head: JointGraph) -> None:
    """``loss_parallel`` overwrites the log-probabilities of labels that other ranks have."""
    result = _run(head)
    assert result.modules is not None
    graph = result.modules[0].graph
    puts = graph.find_nodes(op="call_function", target=aten.index_put.default)
    written = next(filter(_reads_loop, puts), None)
    if written is None:
        pytest.skip("this torch's loss_parallel puts nothing into a loop's result")
    assert written.args[0].target is not aten.clone.default
    lower_loops(graph)
    assert written.args[0].target is aten.clone.default


def _reads_loop(node: fx.Node) -> bool:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    while ops.is_cheap_view(operand):
        operand = operand.all_input_nodes[0]
    return operand.target is operator.getitem and operand.all_input_nodes[0].target is mst_loop
