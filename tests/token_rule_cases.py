"""One call of every op in the op table, with all ways in which its result may be cut into chunks.

tests/test_token_rules.py runs each of them. A new row of the op table needs a case here.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

from mstpass.graph.grouped_products import grouped_rows, grouped_sums
from mstpass.graph.tokens import Spec

aten = torch.ops.aten
prims = torch.ops.prims

B, S, D, E = 3, 4, 6, 5


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


def f8(*shape: int) -> torch.Tensor:
    return x(*shape).to(torch.float8_e4m3fn)


def ids(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape)


BS: Spec = (0, 1)
ROWS = ((0,), (1,), (0, 1))  # of [B, S, D] worked along the last dim
ALL = (*ROWS, (2,), (0, 2), (1, 2), (0, 1, 2))
OF_MATRIX = ((0,), (1,), (0, 1))


def case(target: Any, args: Any, *specs: Spec, sums: Any = (), **kwargs: Any) -> Case:
    return Case(target, args, specs, tuple(sums), tuple(kwargs.items()))


FMA = [prims.fma] if hasattr(prims, "fma") else []
SCALED_BY_ROW = [
    case(
        aten._scaled_mm.default,
        lambda: (
            f8(S, D),
            f8(E, D).t(),
            x(S, 1).float(),
            x(1, E).float(),
            None,
            None,
            torch.float32,
        ),
        (0,),
        (1,),
    ),
]
if torch.__version__ < "2.12":  # one scale for all rows there, on a CPU
    SCALED_BY_ROW = []

CASES = [
    # pointwise, and broadcasting
    case(aten.clone.default, lambda: (x(),), *ALL),
    case(aten.copy.default, lambda: (x(), x()), *ALL),
    case(prims.convert_element_type.default, lambda: (x(), torch.float32), *ALL),
    case(prims.convert_element_type.default, lambda: (5 * x(), torch.int32), *ALL),
    case(prims.convert_element_type.default, lambda: (x(), torch.bool), *ALL),
    case(prims.convert_element_type.default, lambda: (x(), torch.float8_e4m3fn), *ALL),
    case(aten.add.Tensor, lambda: (x(), x(D)), *ROWS, (2,)),
    case(aten.mul.Tensor, lambda: (x(), x(B, 1, 1)), (0,), (1,), (2,), (1, 2)),
    case(aten.mul.Tensor, lambda: (x(B, S), x(B, S)), *OF_MATRIX),
    case(aten.where.self, lambda: (x() > 0, x(), x(S, 1)), (0,), (1,), (2,), (0, 2)),
    case(aten.pow.Tensor_Tensor, lambda: (x().abs(), x()), *ALL),
    case(aten.threshold_backward.default, lambda: (x(), x(), 0), *ALL),
    case(aten.native_dropout_backward.default, lambda: (x(), x() > 0, 2.0), *ALL),
    *(
        case(target, lambda: (x(), x()), *ALL)
        for target in (
            aten.sub.Tensor,
            aten.div.Tensor,
            aten.gelu_backward.default,
            aten.silu_backward.default,
            aten.sigmoid_backward.default,
            aten.tanh_backward.default,
            aten.fmod.Tensor,
            aten.remainder.Tensor,
        )
    ),
    *(
        case(target, lambda: (x(), 1.5), *ALL)
        for target in (
            aten.mul.Scalar,
            aten.div.Scalar,
            aten.fmod.Scalar,
            aten.remainder.Scalar,
        )
    ),
    *(
        case(target, lambda: (x(),), *ALL)
        for target in (
            aten.neg.default,
            aten.reciprocal.default,
            aten.exp.default,
            aten.sigmoid.default,
            aten.tanh.default,
            aten.softplus.default,
            aten.cos.default,
            aten.sin.default,
            aten.erf.default,
            aten.abs.default,
            aten.relu.default,
            aten.sign.default,
            aten.sgn.default,
            aten.floor.default,
            aten.ceil.default,
            aten.round.default,
            aten.trunc.default,
        )
    ),
    *(
        case(target, lambda: (x().abs(),), *ALL)
        for target in (
            aten.log.default,
            aten.log10.default,
            aten.log1p.default,
            aten.log2.default,
            aten.sqrt.default,
            aten.rsqrt.default,
        )
    ),
    *(case(op.default, lambda: (x(), x(), x()), *ALL) for op in FMA),
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
    case(aten.view_as_complex.default, lambda: (x(B, S, D, 2),), *ALL),
    case(aten.view_as_real.default, lambda: (torch.complex(x(), x()),), *ALL),
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
    case(aten.cummin.default, lambda: (x(), 2), *ROWS),
    case(aten.kthvalue.default, lambda: (x(), 2), *ROWS),
    case(aten.median.dim, lambda: (x(), 2), *ROWS),
    case(aten.nanmedian.dim, lambda: (x(), 1), *OF_MATRIX),
    case(aten.mode.default, lambda: (ids(B, S, D, below=3).double(), 2), *ROWS),
    case(aten.logcumsumexp.default, lambda: (x(), 0), (1,), (2,), (1, 2)),
    case(aten.topk.default, lambda: (x(), 2), *ROWS),
    case(aten.topk.default, lambda: (x(), 2, 1), (0,), (2,), (0, 2)),
    case(aten.sort.default, lambda: (x(),), *ROWS),
    case(aten.sort.stable, lambda: (x(),), (0,), (2,), (0, 2), stable=True, dim=1),
    case(aten.flip.default, lambda: (x(), [1]), (0,), (2,), (0, 2)),
    case(prims.rev.default, lambda: (x(), [1]), (0,), (2,), (0, 2)),
    case(aten.repeat.default, lambda: (x(), [1, 1, 2]), *ROWS),
    case(aten.repeat.default, lambda: (x(), [2, 1, 3, 1]), (1,), (3,), (1, 3)),
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
    case(
        grouped_rows,
        lambda: (x(S, D), x(2, D, E), torch.arange(S), torch.tensor([1, S])),
        (0,),
        (1,),
        sums=[(0, (1,)), (1, (1,))],
    ),
    case(
        grouped_sums,
        lambda: (x(D, S), x(S, E), torch.arange(S), torch.tensor([3, S]), torch.float64),
        (1,),
        (2,),
        sums=[(0, (1,)), (1, (0,)), (2, (0,))],
    ),
    case(aten.mm.default, lambda: (x(S, D), x(D, E)), (0,), (1,), sums=[(0, (1,)), (1, (0,))]),
    case(aten.addmm.default, lambda: (x(E), x(S, D), x(D, E)), (0,), (1,)),
    case(aten.addmm.default, lambda: (x(S, E), x(S, D), x(D, E)), (0,), (1,)),
    *SCALED_BY_ROW,
    case(
        aten._scaled_mm.default,
        lambda: (
            f8(S, D),
            f8(E, D).t(),
            x(1, 1).float(),
            x(1, 1).float(),
            None,
            None,
            torch.float32,
        ),
        (0,),
        (1,),
    ),
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
    case(aten.arange.start_step, lambda: (0, S)),
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

# Collectives, for two ranks whose group has the name "0": tests/ranks/token_rules.py runs them.
_c10d = torch.ops._c10d_functional
_FEATURES: tuple[Spec, ...] = ((1,), (2,), (1, 2))
COLLECTIVES = [
    case(_c10d.all_reduce.default, lambda: (x(), "sum", "0"), *ALL),
    case(_c10d.all_reduce.default, lambda: (x(), "max", "0"), *ALL),
    case(_c10d.broadcast.default, lambda: (x(), 0, "0"), *ALL),
    case(_c10d.wait_tensor.default, lambda: (x(),), *ALL),
    case(_c10d.all_gather_into_tensor.default, lambda: (x(), 2, "0"), *_FEATURES),
    case(_c10d.reduce_scatter_tensor.default, lambda: (x(4, S, D), "sum", 2, "0"), *_FEATURES),
    case(_c10d.all_to_all_single.default, lambda: (x(4, S, D), [2, 2], [2, 2], "0"), *_FEATURES),
    case(torch.ops._dtensor.shard_dim_alltoall.default, lambda: (x(), 0, 1, "0"), (2,)),
]
