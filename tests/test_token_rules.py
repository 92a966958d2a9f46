"""Every row of the op table, numerically: what one chunk gives is that chunk of the whole result.

Each case names all ways in which its result may be cut. Each of them is run on chunks and compared;
every other way must be refused: no rule may take tokens that its op mixes.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from mstpass.graph import op_table, ops
from mstpass.graph.joint import tensors_of
from mstpass.graph.token_rules.views import VIEWS
from mstpass.graph.tokens import SUM, Refusal, Spec, chunk_shape, token_count

aten = torch.ops.aten
prims = torch.ops.prims

B, S, D, E = 3, 4, 6, 5
CHUNK = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, the specs that its result may have, and those that its operands may be summed over.

    ``sums`` maps an operand's position among the tensors to the specs that make the result SUM.
    """

    target: Any
    args: Callable[[], tuple[Any, ...]]
    specs: tuple[Spec, ...] = ()
    sums: tuple[tuple[int, Spec], ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (B, S, D), dtype=torch.float64)


def ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape)


BS: Spec = (0, 1)
ROWS = ((0,), (1,), (0, 1))  # of [B, S, D] worked along the last dim
ALL = (*ROWS, (2,), (0, 2), (1, 2), (0, 1, 2))
OF_MATRIX = ((0,), (1,), (0, 1))


def case(target: Any, args: Any, *specs: Spec, sums: Any = (), **kwargs: Any) -> Case:
    return Case(target, args, specs, tuple(sums), tuple(kwargs.items()))


CASES = [
    # pointwise, and broadcasting
    case(aten.clone.default, lambda: (x(),), *ALL),
    case(aten.copy.default, lambda: (x(), x()), *ALL),
    case(prims.convert_element_type.default, lambda: (x(), torch.float32), *ALL),
    case(aten.add.Tensor, lambda: (x(), x(D)), *ROWS, (2,)),
    case(aten.mul.Tensor, lambda: (x(), x(B, 1, 1)), (0,), (1,), (2,), (1, 2)),
    case(aten.mul.Tensor, lambda: (x(B, S), x(B, S)), *OF_MATRIX),
    case(aten.where.self, lambda: (x() > 0, x(), x(S, 1)), (0,), (1,), (2,), (0, 2)),
    case(aten.threshold_backward.default, lambda: (x(), x(), 0), *ALL),
    # views
    case(aten.view.default, lambda: (x(), [B * S, D]), (0,), (1,), (0, 1)),
    case(
        aten.reshape.default,
        lambda: (x(), [B, S, 2, 3]),
        *ROWS,
        (2, 3),
        (0, 2, 3),
        (1, 2, 3),
        (0, 1, 2, 3),
    ),
    case(aten._unsafe_view.default, lambda: (x(), [B, S * D]), (0,), (1,), (0, 1)),
    case(
        aten.unsqueeze.default,
        lambda: (x(), 1),
        (0,),
        (2,),
        (3,),
        (0, 2),
        (0, 3),
        (2, 3),
        (0, 2, 3),
    ),
    case(aten.squeeze.dim, lambda: (x(B, 1, S), 1), *OF_MATRIX),
    case(aten.squeeze.dims, lambda: (x(B, 1, S, 1), [1, 3]), *OF_MATRIX),
    case(aten.squeeze.default, lambda: (x(B, 1, S),), (0,), (1,)),
    case(aten.permute.default, lambda: (x(), [2, 0, 1]), *ALL),
    case(aten.t.default, lambda: (x(S, D),), *OF_MATRIX),
    case(aten.transpose.int, lambda: (x(), 1, 2), *ALL),
    case(aten.expand.default, lambda: (x(B, S, 1), [B, S, D]), *ROWS, (2,)),
    case(aten.select.int, lambda: (x(), 1, 2), *OF_MATRIX),
    case(aten.select.int, lambda: (x(), -1, 2), *OF_MATRIX),
    case(aten.unbind.int, lambda: (x(), 1), *OF_MATRIX),
    case(aten.slice.Tensor, lambda: (x(), 2, 1, 5), *ROWS),
    case(aten.slice.Tensor, lambda: (x(), 1, 0, 3), (0,), (2,), (0, 2)),
    case(aten.split.Tensor, lambda: (x(), 2, -1), *ROWS),
    case(aten.split_with_sizes.default, lambda: (x(), [1, 3], 1), (0,), (2,), (0, 2)),
    case(operator.getitem, lambda: ((x(), x()), 1), *ALL),
    # reductions
    case(aten.sum.dim_IntList, lambda: (x(), [2]), *OF_MATRIX, sums=[(0, (2,))]),
    case(aten.sum.dim_IntList, lambda: (x(), [0, 1], True), (2,), sums=[(0, (0,)), (0, BS)]),
    case(aten.sum.default, lambda: (x(),), sums=[(0, (0,)), (0, BS), (0, (2,))]),
    case(aten.mean.dim, lambda: (x(), [-1], True), *ROWS),
    case(aten.mean.default, lambda: (x(),)),
    case(aten.amax.default, lambda: (x(), [1]), *OF_MATRIX),
    case(aten.amin.default, lambda: (x(), [2], True), *ROWS),
    case(aten.var_mean.correction, lambda: (x(), [2]), *ROWS, correction=0, keepdim=True),
    case(aten.var.correction, lambda: (x(), [1]), *OF_MATRIX, correction=1),
    case(aten.logsumexp.default, lambda: (x(), [2]), *OF_MATRIX),
    case(aten.argmax.default, lambda: (x(), 2), *OF_MATRIX),
    case(aten.argmin.default, lambda: (x(), 1, True), (0,), (2,), (0, 2)),
    case(aten.any.dim, lambda: (x() > 1, 2), *OF_MATRIX),
    case(aten.any.dims, lambda: (x() > 1, [1, 2]), (0,)),
    case(aten.any.dims, lambda: (x() > 1, [2], True), *ROWS),
    case(aten.any.default, lambda: (x() > 1,)),
    case(aten.max.default, lambda: (x(),)),
    case(aten.min.default, lambda: (x(),)),
    case(aten.prod.dim_int, lambda: (x(), 0), *OF_MATRIX),
    case(aten.max.dim, lambda: (x(), 2), *OF_MATRIX),
    case(aten.min.dim, lambda: (x(), -1, True), *ROWS),
    case(aten.native_layer_norm.default, lambda: (x(), [D], x(D), x(D), 1e-5), *ROWS),
    case(aten.native_layer_norm.default, lambda: (x(), [S, D], None, None, 1e-5), (0,)),
    # along a dim
    case(aten._softmax.default, lambda: (x(), -1, False), *ROWS),
    case(aten._log_softmax.default, lambda: (x(), 1, False), (0,), (2,), (0, 2)),
    case(aten.cumsum.default, lambda: (x(), 2), *ROWS),
    case(aten.cumprod.default, lambda: (x(), 1), (0,), (2,), (0, 2)),
    case(aten.cummax.default, lambda: (x(), 2), *ROWS),
    case(aten.logcumsumexp.default, lambda: (x(), 0), (1,), (2,), (1, 2)),
    case(aten.topk.default, lambda: (x(), 2), *ROWS),
    case(aten.topk.default, lambda: (x(), 2, 1), (0,), (2,), (0, 2)),
    case(aten.sort.default, lambda: (x(),), *ROWS),
    case(aten.sort.stable, lambda: (x(),), (0,), (2,), (0, 2), stable=True, dim=1),
    case(aten.flip.default, lambda: (x(), [1]), (0,), (2,), (0, 2)),
    case(prims.rev.default, lambda: (x(), [1]), (0,), (2,), (0, 2)),
    case(aten.roll.default, lambda: (x(), [1], [2]), *ROWS),
    case(aten.roll.default, lambda: (x(), [1])),
    case(aten.tril.default, lambda: (x(),), (0,)),
    case(aten.triu.default, lambda: (x(), 1), (0,)),
    case(aten.cat.default, lambda: ([x(), x(B, S, E)], 2), *ROWS),
    case(aten.cat.default, lambda: ([x(), x()],), (1,), (2,), (1, 2)),
    case(aten.stack.default, lambda: ([x(S, D), x(S, D)], 1), (0,), (2,), (0, 2)),
    case(aten.stack.default, lambda: ([x(S, D), x(S, D)], -1), *ROWS),
    case(aten.gather.default, lambda: (x(), 2, ids(B, S, 1, below=D)), *ROWS),
    case(aten.gather.default, lambda: (x(), 2, ids(B, S - 1, 2, below=D)), (0,)),
    case(aten.scatter.value, lambda: (x(), 2, ids(B, S, 1, below=D), 1.0), *ROWS),
    case(aten.scatter.value, lambda: (x(), 2, ids(B, 1, 1, below=D), 1.0), (0,)),
    case(aten.scatter.src, lambda: (x(), 1, ids(B, S, D, below=1), x()), (0,), (2,), (0, 2)),
    case(aten.scatter_add.default, lambda: (x(), 2, ids(B, S, E, below=D), x()), *ROWS),
    case(
        aten.scatter_reduce.two, lambda: (x(), 2, ids(B, S, E, below=D), x(B, S, E), "amax"), *ROWS
    ),
    case(aten.slice_scatter.default, lambda: (x(), x(B, S, 2), 2, 1, 3), *ROWS),
    case(aten.slice_scatter.default, lambda: (x(), x(B, 2, D), 1, 0, 2), (0,), (2,), (0, 2)),
    case(aten.select_scatter.default, lambda: (x(), x(B, D), 1, 2), (0,), (2,), (0, 2)),
    case(aten.select_scatter.default, lambda: (x(), x(B, S), -1, 2), *ROWS),
    case(aten.constant_pad_nd.default, lambda: (x(), [1, 0]), *ROWS),
    case(aten.constant_pad_nd.default, lambda: (x(), [0, 0, 1, -1]), (0,), (2,), (0, 2)),
    # by index tensors
    case(aten.embedding.default, lambda: (x(7, D), ids(B, S, below=7)), *ROWS),
    case(aten.index.Tensor, lambda: (x(), [None, None, ids(E, below=D)]), *ROWS, (2,)),
    case(
        aten.index.Tensor,
        lambda: (x(), [None, ids(2, E, below=S)]),
        (0,),
        (1,),
        (2,),
        (3,),
        (0, 3),
        (1, 2),
    ),
    case(aten.index.Tensor, lambda: (x(7, D), [ids(B, S, below=7)]), *ROWS, (2,)),
    case(
        aten.index.Tensor,
        lambda: (x(), [ids(E, below=B), None, ids(E, below=D)]),
        (0,),
        (1,),
    ),
    case(
        aten.index.Tensor, lambda: (x(S, D), [ids(S, 1, below=S), ids(1, D, below=D)]), (0,), (1,)
    ),
    case(aten._unsafe_index.Tensor, lambda: (x(7, D), [ids(B, S, below=7)]), *ROWS, (2,)),
    case(
        aten.index_put.default,
        lambda: (x(), [None, None, ids(E, below=D)], x(B, S, E), True),
        *ROWS,
    ),
    case(aten.index_put.default, lambda: (x(), [ids(2, below=B)], x(S, D)), (1,), (2,), (1, 2)),
    case(
        aten._unsafe_index_put.default,
        lambda: (x(), [None, ids(2, below=S)], x(B, 2, 1), True),
        (0,),
        (2,),
    ),
    # matmuls
    case(aten.mm.default, lambda: (x(S, D), x(D, E)), (0,), (1,), sums=[(0, (1,)), (1, (0,))]),
    case(aten.addmm.default, lambda: (x(E), x(S, D), x(D, E)), (0,), (1,)),
    case(aten.addmm.default, lambda: (x(S, E), x(S, D), x(D, E)), (0,), (1,)),
    case(
        aten.bmm.default,
        lambda: (x(B, S, D), x(B, D, E)),
        (0,),
        (1,),
        (2,),
        sums=[(0, (2,)), (1, (1,))],
    ),
    case(aten.baddbmm.default, lambda: (x(B, 1, E), x(B, S, D), x(B, D, E)), (0,), (1,), (2,)),
    # created
    *(
        case(target, lambda: ([B, S],), *OF_MATRIX)
        for target in (aten.zeros.default, aten.ones.default)
    ),
    case(aten.full.default, lambda: ([B, S], 2.0), *OF_MATRIX),
    case(aten.full_like.default, lambda: (x(B, S), 2.0), *OF_MATRIX),
    case(aten.zeros_like.default, lambda: (x(B, S),), *OF_MATRIX),
    case(aten.ones_like.default, lambda: (x(B, S),), *OF_MATRIX),
    case(aten.scalar_tensor.default, lambda: (2.0,)),
    case(
        prims.iota.default,
        lambda: (S,),
        start=0,
        step=1,
        dtype=torch.int64,
        device=torch.device("cpu"),
        requires_grad=False,
    ),
]


def _name(given: Case) -> str:
    return str(given.target).removeprefix("aten.")


# ---- running a case -----------------------------------------------------------------------------
def _node(given: Case) -> tuple[fx.Node, dict[fx.Node, Any]]:
    """The case as a node of a graph, and the real tensors of its operands."""
    graph, values = fx.Graph(), {}

    def holder(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"operand_{len(values)}")
            node.meta["val"] = values[node] = value
            return node
        if isinstance(value, tuple):  # a tuple of tensors is one operand, an op's several results
            node = graph.placeholder(f"operand_{len(values)}")
            node.meta["val"] = values[node] = value
            return node
        if isinstance(value, list):
            return [holder(v) for v in value]
        return value

    args = tuple(holder(a) for a in given.args())
    node = graph.call_function(given.target, args, dict(given.kwargs))
    node.meta["val"] = _call(node, values)
    return node, values


def _call(node: fx.Node, values: dict[fx.Node, Any], **replaced: Any) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if replaced:
        args = (*args[: replaced["at"]], replaced["shape"], *args[replaced["at"] + 1 :])
    target = node.target if node.target is not aten.view.default else aten.reshape.default
    return target(*args, **kwargs)


def _chunk(value: Any, spec: Spec, first: int, length: int) -> Any:
    """Tokens ``first`` to ``first + length`` of a value in chunk form."""
    if isinstance(value, tuple | list):
        return tuple(_chunk(v, spec, first, length) for v in value)
    if not spec:
        return value
    rest = [d for d in range(value.dim()) if d not in spec]
    rows = value.permute(*spec, *rest).reshape(-1, *(value.shape[d] for d in rest))
    rows = rows[first : first + length]
    order = [*spec, *rest]
    shaped = rows.reshape(*[1] * (len(spec) - 1), length, *rows.shape[1:])
    result = shaped.permute(*(order.index(d) for d in range(len(order))))
    assert list(result.shape) == chunk_shape(value.shape, spec, length)
    return result


def _shapes(value: Any) -> list[torch.Size]:
    return [t.shape for t in tensors_of(value)]


def _all_specs(rank: int) -> list[Spec]:
    return [c for r in range(1, rank + 1) for c in itertools.combinations(range(rank), r)]


def _run_chunks(node: fx.Node, values: dict[fx.Node, Any], spec: Spec) -> None:
    needs = ops.operand_specs(node, spec)
    assert not isinstance(needs, Refusal), needs
    row = ops.lookup(node)
    assert isinstance(row, op_table.Op)
    shape = _shapes(node.meta["val"])[0]
    count = token_count(shape, spec)
    for operand, need in needs.items():
        if need:
            assert ops.result_spec(node, operand, need) == spec, (operand, need)
    for first in range(count - CHUNK + 1):
        cut = {n: _chunk(values[n], needs[n], first, CHUNK) for n in values}
        replaced = (
            {"at": row.shape_arg, "shape": chunk_shape(shape, spec, CHUNK)}
            if row.shape_arg is not None
            else {}
        )
        part = _call(node, cut, **replaced)
        expected = _chunk(node.meta["val"], spec, first, CHUNK)
        pairs = zip(tensors_of(part), tensors_of(expected), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_a_chunk_of_the_result_is_the_result_of_chunks(given: Case) -> None:
    node, values = _node(given)
    for spec in given.specs:
        _run_chunks(node, values, spec)


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_any_other_cut_is_refused(given: Case) -> None:
    node, _ = _node(given)
    shape = _shapes(node.meta["val"])[0]
    without_ones = [s for s in _all_specs(len(shape)) if all(shape[d] != 1 for d in s)]
    taken = [s for s in without_ones if not isinstance(ops.operand_specs(node, s), Refusal)]
    assert set(taken) <= set(given.specs), "taken without a numerical check"


@pytest.mark.parametrize("given", CASES, ids=_name)
def test_what_operands_give_is_what_the_result_needs(given: Case) -> None:
    """Forward and backward rules agree, and sums over tokens are those that the case names."""
    node, values = _node(given)
    tensors = list(values)
    for operand in tensors:
        shape = _shapes(values[operand])[0]
        for spec in _all_specs(len(shape)):
            if any(shape[d] == 1 for d in spec):
                continue
            result = ops.result_spec(node, operand, spec)
            if result == SUM:
                _check_sum(node, values, operand, spec)
            elif isinstance(result, tuple) and result:
                needs = ops.operand_specs(node, result)
                assert isinstance(needs, Refusal) or needs[operand] == spec, (spec, result, needs)
    for position, spec in given.sums:
        assert ops.result_spec(node, tensors[position], spec) == SUM


def _check_sum(node: fx.Node, values: dict[fx.Node, Any], operand: fx.Node, spec: Spec) -> None:
    needs = ops.sum_operands(node, operand, spec)
    assert not isinstance(needs, Refusal)
    count = token_count(values[operand].shape, spec)
    total = torch.zeros_like(node.meta["val"])
    for first in range(count):
        total += _call(node, {n: _chunk(values[n], needs.get(n, ()), first, 1) for n in values})
    torch.testing.assert_close(total, node.meta["val"])


def test_every_row_of_the_table_has_a_case() -> None:
    assert set(op_table.TABLE) <= {given.target for given in CASES}


def test_views_are_the_rows_of_that_kind() -> None:
    assert {target for target, row in op_table.TABLE.items() if row.kind == "view"} == VIEWS


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (aten.mul.Tensor, lambda: (x(), x(S, 1)), "some of the token dims"),
        (aten.index.Tensor, lambda: (x(), [ids(E, below=B)]), "picks tokens"),
        (aten.index.Tensor, lambda: (x(S, D), [x(S, D) > 0]), "by a mask"),
        (aten.index_put.default, lambda: (x(), [ids(B, below=B)], x()), "along a token dim"),
        (aten.histc.default, lambda: (x(),), "counts over all"),
        (aten.bernoulli.p, lambda: (x(), 0.5), "random"),
        (aten.add_.Tensor, lambda: (x(), 1), "writes to its operands"),
        (aten.as_strided.default, lambda: (x(), [B], [1]), "addresses memory"),
        (aten.unfold.default, lambda: (x(), 1, 2, 1), "no token rule"),
    ],
)
def test_refusals_say_why(target: Any, args: Any, reason: str) -> None:
    node, values = _node(Case(target, args))
    operand = next(iter(values))
    found = [ops.result_spec(node, operand, (0,)), ops.operand_specs(node, (0, 1))]
    assert any(isinstance(r, Refusal) and reason in r.reason for r in found), found


def test_unknown_ops_are_told_from_known_refusals() -> None:
    node, _ = _node(Case(aten.unfold.default, lambda: (x(), 1, 2, 1)))
    assert isinstance(ops.lookup(node), ops.NoRule)
    node, _ = _node(Case(aten.histc.default, lambda: (x(),)))
    assert isinstance(ops.lookup(node), Refusal) and not isinstance(ops.lookup(node), ops.NoRule)
