"""Ops that write into the buffers of a lowered loop, and the counter of its iterations.

    mstpass::add_product_(total, left, right, chunk)    total  = left @ right      if chunk is 0
                                                        total += left @ right      otherwise
    mstpass::write_product_(rows, left, right)          rows   = left @ right
    mstpass::counter(value)                             an int64 scalar on the CPU

Inductor calls them as they are. So a product goes straight to where it is needed, without a second
buffer of its size and a kernel that reads and writes both; the first chunk needs no zeros to add
to; and no C++ is compiled for the arithmetic of a counter. The counter is on the CPU, where reading
it waits for no device.

Factors of half precision are added up in a total of float32 by cuBLAS itself, on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, library

from mstpass.torch_internals.inductor_lowerings import call_as_it_is
from mstpass.torch_internals.op_types import OpOverload

aten = torch.ops.aten

_LIBRARY = library.Library("mstpass", "FRAGMENT")
_LIBRARY.define("add_product_(Tensor(a!) total, Tensor left, Tensor right, SymInt chunk) -> ()")
_LIBRARY.define("write_product_(Tensor(a!) rows, Tensor left, Tensor right) -> ()")
_LIBRARY.define("counter(SymInt value) -> Tensor")


def _add_product(total: Tensor, left: Tensor, right: Tensor, chunk: int) -> None:
    _product(left, right, total, beta=min(chunk, 1))  # with 0, what is there does not count: no NaN


def _write_product(rows: Tensor, left: Tensor, right: Tensor) -> None:
    _product(left, right, rows, beta=0)


def _product(left: Tensor, right: Tensor, out: Tensor, beta: int) -> None:
    """``out = beta * out + left @ right``, for matrices or batches of them."""
    add = torch.addmm if out.dim() == 2 else torch.baddbmm
    if left.dtype == out.dtype:
        add(out, left, right, beta=beta, out=out)
    elif out.is_cuda:
        add(out, left, right, out_dtype=out.dtype, beta=beta, out=out)
    else:  # only CUDA has products whose result is wider than their factors
        add(out, left.to(out.dtype), right.to(out.dtype), beta=beta, out=out)


def _counter(value: int) -> Tensor:
    return torch.full([], value, dtype=torch.int64)


_LIBRARY.impl("add_product_", _add_product, "CompositeExplicitAutograd")
_LIBRARY.impl("write_product_", _write_product, "CompositeExplicitAutograd")
_LIBRARY.impl("counter", _counter, "CompositeExplicitAutograd")


@library.register_fake("mstpass::add_product_", lib=_LIBRARY)
def _(total: Tensor, left: Tensor, right: Tensor, chunk: int) -> None:
    return None


@library.register_fake("mstpass::write_product_", lib=_LIBRARY)
def _(rows: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@library.register_fake("mstpass::counter", lib=_LIBRARY)
def _(value: int) -> Tensor:
    return torch.empty([], dtype=torch.int64)


add_product_: OpOverload = torch.ops.mstpass.add_product_.default
write_product_: OpOverload = torch.ops.mstpass.write_product_.default
counter: OpOverload = torch.ops.mstpass.counter.default

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype)


def call_buffer_ops_as_they_are() -> None:
    """Have Inductor call the ops, and those in place that a loop may need besides."""
    for op in (add_product_, write_product_, counter, aten.abs_.default):
        call_as_it_is(op)


def is_written_in_place(node: fx.Node) -> bool:
    """Whether a result of a loop's body goes straight into the loop's buffer.

    It does if it is a product that nothing else reads.
    """
    return node.op == "call_function" and node.target in _PRODUCTS and len(node.users) == 1
