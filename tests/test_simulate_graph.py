"""The simulated memory: each rule of the model on a small graph, and whole steps as measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import mstpass
from mstpass.bench.models import LlamaSize, llama
from mstpass.measure import peak_bytes
from mstpass.memory.simulate_graph import op_of
from mstpass.memory.simulate_ops import Timeline, simulate_ops
from mstpass.problem.op import CALL, Op
from tests.checks import compiled

SIZE = 4 * 64 * 64  # bytes of every value below
X = torch.randn(64, 64)


def simulate_graph(graph: fx.Graph, freed: Iterable[fx.Node] = ()) -> Timeline:
    """The memory of one graph; ``freed`` are inputs that are freed after their last use."""
    ops = [op_of(n) for n in graph.nodes if n.op in ("placeholder", "call_function")]
    results: Any = graph.output_node().args[0]
    kept = [n.name for n in (results if isinstance(results, tuple | list) else [results]) if n]
    return simulate_ops(ops, kept, [n.name for n in freed])


def _peak(fn: Callable[..., Any], *inputs: Tensor) -> float:
    """The peak, as a multiple of the size of one value."""
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    return simulate_graph(graph).peak.bytes / SIZE


def test_a_pointwise_value_has_no_buffer_of_its_own() -> None:
    assert _peak(lambda x: x.sin().cos().exp() + 1, X) == 1


def test_a_matmul_has_a_buffer_and_so_has_its_operand() -> None:
    assert _peak(lambda x: x.sin() @ x, X) == 2


def test_a_buffer_ends_with_its_last_reader() -> None:
    assert _peak(lambda x: ((x @ x) @ x) @ x, X) == 2


def test_a_pointwise_kernel_writes_over_an_operand_that_it_reads_last() -> None:
    assert _peak(lambda x: (x @ x).sin(), X) == 1
    assert _peak(lambda x: [(y := x @ x).sin(), y], X) == 2


def test_a_view_keeps_its_base_alive() -> None:
    assert _peak(lambda x: [(x @ x).t(), (x.t() @ x)], X) == 2


def test_the_parts_of_what_was_split_share_its_buffer() -> None:
    def peak(read: Callable[[Tensor], Tensor]) -> float:
        return _peak(lambda x: [read(part) for part in (x @ x).split(32, 1)], X)

    assert peak(lambda part: part @ part.t()) == 3, "the whole, and two products"
    assert peak(lambda part: part.t().contiguous() @ part) == 2, "copies are buffers"


def test_a_value_that_only_its_fused_kernel_reads_has_no_buffer() -> None:
    """exp is slow to compute twice, but both its readers are in one kernel."""
    assert _peak(lambda x: torch.softmax(x.exp(), -1).sum(-1), X) < 1


def test_a_value_computed_from_a_slow_one_is_slow_as_well() -> None:
    def peak(slow: Callable[[Tensor], Tensor]) -> float:
        return _peak(lambda x: [(y := slow(x) + 1).sum(-1), y.flip(1).sum(-1)], X)

    assert 1 <= peak(torch.tanh) < 1.2
    assert peak(torch.relu) < 0.2


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y[::2].sum(-1),
        lambda y: y.flip(0).sum(-1),
        lambda y: y.gather(1, torch.zeros(64, 1, dtype=torch.long)),
        lambda y: y.sum(0),
    ],
    ids=["part", "flip", "gather", "outer dim"],
)
def test_a_kernel_with_loops_of_its_own_reads_a_buffer(read: Callable[[Tensor], Tensor]) -> None:
    assert 1 <= _peak(lambda x: [(y := x.exp()).sum(-1), read(y)], X) < 1.2
    of_row = _peak(lambda x: [(y := (x - x.amax(-1, True)).exp()).sum(-1), (y + 1).sum(-1)], X)
    assert of_row < 0.2


def test_a_row_is_local_where_no_kernel_runs_over_the_rows_alone() -> None:
    """The exponentials of a row, which its sum and its softmax read."""

    def peak(result: Callable[[Tensor, Tensor, Tensor], Any]) -> int:
        def fn(x: Tensor) -> Any:
            logits = x @ x
            exp = (logits - logits.amax(-1, True)).exp()
            return result(logits, exp, exp.sum(-1, True))

        return round(_peak(fn, X))

    # What reads the exponentials behind the sum reads the logits too, so both are alive at once.
    assert peak(lambda x, exp, z: (exp / z * x).sum(-1)) == 1
    assert peak(lambda x, exp, z: [(exp / z * x).sum(-1), z.log().mean()]) == 1
    assert peak(lambda x, exp, z: (exp / z * (x - z.log())).sum(-1)) == 2
    assert peak(lambda x, exp, z: [(exp / z * x).sum(-1), z.log()]) == 2


def test_a_view_of_a_product_is_read_behind_it_however_many_views_there_are() -> None:
    def fn(x: Tensor) -> Tensor:
        logits = x @ x
        exp = (logits - logits.amax(-1, True)).exp()
        z = exp.sum(-1, True)
        return (exp / z * (logits.view(16, 4, 64).view(64, 64) - z.log())).sum(-1)

    assert round(_peak(fn, X)) == 2, "the logits, and the exponentials as above"


def test_kernels_that_run_as_one_run_where_the_first_of_them_does() -> None:
    """The scores and what reads them behind another product, which is then computed first."""

    def fn(x: Tensor, mask: Tensor) -> list[Tensor]:
        logits = x @ x
        exp = (logits - logits.amax(-1, True)).exp()
        scores = exp / exp.sum(-1, True)
        masked = (scores * mask) @ x
        return [masked, (scores * (x.t() @ x)).sum(-1)]

    assert round(_peak(fn, X, X.clone())) == 3, "both products, and the masked scores"


def test_a_copy_in_another_order_is_not_written_over_its_operand() -> None:
    assert _peak(lambda x: (x @ x).t().contiguous() @ x, X) == 2
    assert _peak(lambda x: [(x @ x).t().contiguous()], X) == 2
    assert _peak(lambda x: [(x @ x).t().clone()], X) == 1  # keeps the order


def test_outer_dims_are_those_of_memory() -> None:
    of_row = lambda x: [(y := (x - x.amax(-1, True)).exp()).sum(-1), y.t().sum(0)]
    assert _peak(of_row, X) < 0.2


def test_kernels_without_a_call_in_between_are_one_function_on_the_cpu() -> None:
    """What they read is freed after all of them; elsewhere each frees its own operands."""

    def fn(x: Tensor) -> list[Tensor]:
        y = (x @ x).flip(0).exp()
        return [y.flip(0), y.flip(1)]

    assert _peak(fn, X) == 4
    assert _peak(fn, X.to("meta")) == 3


def test_a_symbolic_size_ends_no_function() -> None:
    ops = [
        Op("product", 4, kind=CALL, on_cpu=True),
        Op("one", 4, ("product",), on_cpu=True),
        Op("size", 0, ("one",), kind="size"),
        Op("other", 4, ("product",), on_cpu=True),
    ]
    assert simulate_ops(ops, ["one", "other"]).peak.bytes == 12


def test_kernels_that_run_as_one_write_over_no_operand_that_both_read() -> None:
    assert _peak(lambda x: [(y := x @ x).sin(), y.cos()], X) == 3
    assert _peak(lambda x: (y := x @ x).sin() * y.sum(-1), X) < 1.2  # the sum comes first


def test_each_result_of_a_call_has_a_buffer_of_its_own() -> None:
    """Attention's first result is read; its sums, one per row and head, are freed at once."""
    q = torch.randn(1, 2, 64, 32)
    graph = make_fx(lambda q, w: F.scaled_dot_product_attention(q, q, q) @ w, tracing_mode="fake")(
        q, torch.eye(32)
    ).graph
    attention, matmul = simulate_graph(graph).moments
    value, sums = 4 * q.numel(), 4 * 2 * 64
    workspace = torch.get_num_threads() * 4 * 32 * (64 + 32 + 2)
    assert attention.bytes == value + sums + workspace
    assert matmul.bytes == 2 * value


def test_reads_are_counted_once_for_each_place() -> None:
    """A sum of neighbours, three times over, reads four places of each row."""

    def peak(weigh: Callable[[Tensor, Tensor], Tensor]) -> float:
        def sums(x: Tensor, weight_N1: Tensor) -> list[Tensor]:
            for _ in range(3):
                x = weigh(x[:, :-1], weight_N1) + weigh(x[:, 1:], weight_N1)
            return [x.sum(-1), x.flip(1).sum(-1)]

        return _peak(sums, X, torch.randn(64, 1))

    assert peak(lambda part, weight: part) < 0.2
    assert peak(lambda part, weight: part * weight) > 0.9, "five reads: it is written to memory"


def test_a_reduction_on_the_cpu_has_a_buffer() -> None:
    def sums(x: Tensor) -> list[Tensor]:
        row_N1 = x.amax(-1, True)
        return [(x - row_N1).sum(-1), (x * row_N1).sum(-1)]

    assert _peak(sums, X) == 3 / 64


def test_a_sum_over_rows_is_no_part_of_a_kernel_with_more_loops() -> None:
    """The rows of [64, 8, 8] are one dim for a sum that reads them as they lie in memory."""

    def peak(*grid: int) -> float:
        def sums(x: Tensor, grid: Tensor) -> list[Tensor]:
            return [(y := (x - grid).exp()).sum(-1), (y * 2).sum(-1)]

        return _peak(sums, torch.randn(64, 8, 1), torch.randn(grid))

    assert peak(8, 8) > 1
    assert peak(8) < 0.5, "one loop over rows, and one in each row"


def test_a_copy_of_a_copy_is_computed_where_it_is_read() -> None:
    def sums(x: Tensor) -> list[Tensor]:
        y = ((x := x.view(4, 4, 16, 16)) - x.amax(-1, True)).exp()
        copy = y.clone(memory_format=torch.channels_last)
        return [y.sum(-1), copy.clone(memory_format=torch.contiguous_format).sum(-1)]

    assert _peak(sums, X) < 0.5


def test_a_result_of_a_call_that_nobody_reads_exists_while_it_runs() -> None:
    graph = make_fx(lambda x: (x @ x).sort(-1).values @ x, tracing_mode="fake")(X).graph
    graph.eliminate_dead_code()
    operand, values, indices = 1, 1, 2
    assert simulate_graph(graph).peak.bytes / SIZE == operand + values + indices


def test_a_scatter_computes_its_rows_itself() -> None:
    def scatter(x: Tensor, index: Tensor) -> Tensor:
        product, other = x @ x, x.t() @ x
        return torch.ops.aten.index_put(torch.zeros(64, 64), [index], product + other, True)

    assert _peak(scatter, X, torch.zeros(64, dtype=torch.int64)) == 3  # and not the sum


def test_a_scatter_that_is_read_at_once_has_a_buffer() -> None:
    """The gradient of a tied embedding: a scatter of rows, and the head's weight gradient."""

    def tied(x: Tensor, index: Tensor) -> Tensor:
        return x @ x + torch.ops.aten.index_put(torch.zeros(64, 64), [index], x, True)

    assert _peak(tied, X, torch.zeros(64, dtype=torch.int64)) == 2


def test_the_parts_of_a_concatenation_are_computed_in_their_places() -> None:
    assert _peak(lambda x: torch.cat([x @ x, x.t() @ x]), X) == 2
    assert _peak(lambda x: torch.cat([x.sin(), x @ x]).amax(-1), X) < 2.1
    assert _peak(lambda x: [torch.cat([(y := x @ x), x.t() @ x]).sum(), y.cos() @ x], X) < 3.1
    assert _peak(lambda x: torch.cat([x @ x, x.t() @ x]).exp(), X) == 4  # not written over


def test_the_parts_of_a_concatenation_are_written_over_nothing() -> None:
    def fn(x: Tensor, weight: Tensor) -> Tensor:
        first, _ = torch.ops.aten.split.Tensor(x @ weight, 64, 1)
        return torch.cat([first.exp(), x.cos()], 1)

    assert _peak(fn, X, torch.randn(64, 128)) == 4


def test_a_slow_value_is_computed_in_its_readers_behind_a_call() -> None:
    """It depends on no call, and its readers on one; no call lies between them."""

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        product = x @ x
        slow = y.exp()
        return [product * slow, product + slow]

    assert _peak(fn, X, X.clone()) == 3


def test_parts_that_lie_elsewhere_are_copied() -> None:
    """Inputs, views, and what the graph returns besides; the others are in their places."""
    assert _peak(lambda x: torch.cat([x, x @ x]), X) == 2
    assert _peak(lambda x: torch.cat([(x @ x).t(), (x.t() @ x).t()]), X) == 4
    assert _peak(lambda x: torch.cat([(x @ x).t(), x.t() @ x]), X) == 3
    assert _peak(lambda x: [torch.cat([(y := x @ x), x.t() @ x]), y], X) == 3


def test_the_part_of_a_concatenation_that_is_computed_first_allocates_it() -> None:
    def fn(x: Tensor) -> Tensor:
        first = x @ x
        second = x.t() @ x
        return torch.cat([x @ (second @ second), first])

    assert _peak(fn, X) == 4, "the whole, the second product and its square"


def test_a_concatenation_that_copies_a_part_lives_until_it_is_read_last() -> None:
    assert _peak(lambda x: (y := torch.cat([x, x @ x], 1)) @ (y.t() @ x), X) == 2 + 2 + 1


def test_a_concatenation_of_views_is_copied_in_the_function_that_reads_it() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cat([(x @ x).view(-1), (x.t() @ x).view(-1)]).exp()

    assert _peak(fn, X) == 2 + 2 + 2, "the products, the whole, and what is not written over it"


def test_inputs_count_only_if_they_are_freed() -> None:
    graph = make_fx(lambda x, y: (x @ x) @ y, tracing_mode="fake")(X, X.clone()).graph
    x, _ = graph.find_nodes(op="placeholder")
    assert simulate_graph(graph).peak.bytes == 2 * SIZE
    freed = simulate_graph(graph, [x])
    assert [m.bytes // SIZE for m in freed.moments] == [2, 2]
    assert freed.peak.node == "mm"


def test_an_empty_graph_needs_nothing() -> None:
    graph = fx.Graph()
    graph.output(())
    assert simulate_graph(graph).peak.bytes == 0


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(
            LlamaSize(64, 2, 2, 192, 4096, 512), {"chunk_tokens": 128}, marks=pytest.mark.full
        ),
        pytest.param(
            LlamaSize(128, 3, 4, 384, 512, 1024), {"memory_budget": 0.0}, marks=pytest.mark.full
        ),
        (LlamaSize(64, 0, 2, 192, 2048, 512), {"chunk": "off"}),
        pytest.param(LlamaSize(64, 1, 2, 192, 2048, 512), {"chunk": "off"}, marks=pytest.mark.full),
        pytest.param(LlamaSize(128, 8, 4, 352, 8000, 1024), {}, marks=pytest.mark.full),
    ],
)
def test_the_measured_peak_is_the_simulated_one(size: LlamaSize, options: dict[str, Any]) -> None:
    model, ids, target = llama(size, torch.device("cpu"))
    step = compiled(lambda ids, target: model(ids, target), **options)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        step(ids, target).backward()

    run()
    model.zero_grad(set_to_none=True)
    simulated = mstpass.reports()[-1].peak_bytes
    assert simulated == pytest.approx(peak_bytes(run), rel=0.05)
