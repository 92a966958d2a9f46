"""Row sums in closed form, against the sums themselves."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mstpass.graph.builder import Builder, fake_mode_of
from mstpass.graph.row_sums import rewritten_row_sum

pytestmark = pytest.mark.sampled(6)

aten = torch.ops.aten
ROWS, WIDTH = 6, 40
INF, NAN = math.inf, math.nan


def _one_hot(index: Tensor) -> Tensor:
    places = torch.ops.prims.iota(
        WIDTH, start=0, step=1, dtype=torch.int64, device=index.device, requires_grad=False
    )
    hit = torch.scalar_tensor(-1.0)
    return aten.where.self(aten.eq.Tensor(index, places), hit, torch.scalar_tensor(0.0))


def _guarded(x: Tensor) -> Tensor:
    m = aten.amax(x, [1], True)
    return aten.where.self(aten.eq.Scalar(aten.abs(m), INF), torch.full([], 0.0), m)


def _log_softmax(x: Tensor) -> Tensor:
    shifted = aten.sub.Tensor(x, aten.amax(x, [1], True))
    return aten.sub.Tensor(shifted, aten.log(aten.sum.dim_IntList(aten.exp(shifted), [1], True)))


Wide = Callable[[Tensor, Tensor, Tensor], Tensor]  # of values, indices, one factor per row
CLOSED: dict[str, Wide] = {
    "constant": lambda x, i, r: r.expand(ROWS, WIDTH),
    "one-hot": lambda x, i, r: _one_hot(i),
    "one-hot times factor": lambda x, i, r: aten.mul.Tensor(_one_hot(i), r),
    "label smoothing": lambda x, i, r: aten.add.Tensor(
        r.expand(ROWS, WIDTH), aten.mul.Tensor(_one_hot(i), r)
    ),
    "difference": lambda x, i, r: aten.sub.Tensor(aten.neg(_one_hot(i)), r.expand(ROWS, WIDTH)),
    "log-softmax": lambda x, i, r: _log_softmax(x),
    "exponentials": lambda x, i, r: aten.exp(aten.sub.Tensor(x, _guarded(x))),
}
OPEN: dict[str, Wide] = {
    "values": lambda x, i, r: aten.neg(x),
    "a sum with values": lambda x, i, r: aten.add.Tensor(x, _one_hot(i)),
    "wide factor": lambda x, i, r: aten.mul.Tensor(_one_hot(i), x),
    "another row's maximum": lambda x, i, r: aten.sub.Tensor(x, aten.log(r)),
    "not the maximum": lambda x, i, r: aten.exp(aten.sub.Tensor(x, r)),
}
REDUCTIONS = {
    "sum": lambda x: aten.sum.dim_IntList(x, [1]),
    "sum, kept": lambda x: aten.sum.dim_IntList(x, [-1], True),
    "mean": lambda x: aten.mean.dim(x, [1], True),
}


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = 3 * torch.randn(ROWS, WIDTH, dtype=dtype)
    x[1, 3], x[2, :], x[3, 5], x[4, :7] = INF, -INF, NAN, -INF
    index = torch.tensor([0, 39, 7, -1, 40, 5]).unsqueeze(1)
    return x, index, torch.tensor([1.5, -2.0, INF, 3.0, NAN, 0.0], dtype=dtype).unsqueeze(1)


def _rewritten(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> fx.GraphModule | None:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    (output,) = module.graph.find_nodes(op="output")
    (node,) = output.args if isinstance(output.args[0], fx.Node) else output.args[0]
    builder = Builder(module.graph, fake_mode_of(module.graph.nodes))
    with module.graph.inserting_before(node):
        short = rewritten_row_sum(builder, node.target, node.args, node.kwargs)
    if short is None:
        return None
    node.replace_all_uses_with(short)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CLOSED)
def test_closed_form(name: str, reduction: str) -> None:
    inputs = _inputs()
    function = lambda *args: REDUCTIONS[reduction](CLOSED[name](*args))
    module = _rewritten(function, inputs)
    assert module is not None
    torch.testing.assert_close(
        module(*inputs), function(*inputs), equal_nan=True, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", OPEN)
def test_other_sums_stay_as_they_are(name: str) -> None:
    function = lambda *args: REDUCTIONS["sum"](OPEN[name](*args))
    assert _rewritten(function, _inputs()) is None


def test_sums_of_exponentials_are_bit_identical() -> None:
    inputs = _inputs()
    function = lambda *args: REDUCTIONS["sum"](CLOSED["exponentials"](*args))
    module = _rewritten(function, inputs)
    assert module is not None
    torch.testing.assert_close(module(*inputs), function(*inputs), equal_nan=True, rtol=0, atol=0)


def test_a_constant_of_low_precision_is_summed_as_it_is() -> None:
    """40 x 1.01 in bfloat16 is rounded twice, the sum in float32 once."""
    function = lambda *args: REDUCTIONS["sum"](CLOSED["constant"](*args))
    assert _rewritten(function, _inputs(torch.bfloat16)) is None


LABELS = """
    import contextlib
    import torch
    import torch.nn.functional as F
    import mstpass
    from tests.checks import compiled, op_by_op

    x, weight = torch.randn(256, 16, requires_grad=True), torch.randn(600, 16, requires_grad=True)
    labels = torch.randint(0, 600, (256,))
    labels[5] = {label}
    ignored = {{"label_smoothing": {smoothing}, "ignore_index": {label}}}
    for options, kernels in ((ignored, False), ({{"label_smoothing": {smoothing}}}, True)):
        with contextlib.nullcontext() if kernels else op_by_op():
            value = compiled(
                lambda: F.cross_entropy(x @ weight.t(), labels, **options), chunk_tokens=64
            )()
            assert mstpass.reports()[-1].regions, "not chunked"
            value.backward()
        print("right", flush=True)
"""


@pytest.mark.parametrize(
    ("label", "smoothing"),
    [
        (-1, 0.1),
        *(pytest.param(*p, marks=pytest.mark.full) for p in ((600, 0.1), (-1, 0), (600, 0))),
    ],
)
def test_a_label_out_of_bounds_is_an_error_unless_it_is_ignored(
    label: int, smoothing: float
) -> None:
    """In a process of its own: Inductor's kernels may abort it."""
    code = textwrap.dedent(LABELS).format(label=label, smoothing=smoothing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == "right\n", done.stderr
    assert "out of bounds: 0 <= index < 600" in done.stderr, done.stderr
