"""Ops that write into the buffers of a lowered loop, and the counter of its iterations.

    mstpass::add_product_(total, left, right, chunk)    total  = left @ right      if chunk is 0
                                                        total += left @ right      otherwise
    mstpass::counter(value)                             an int64 scalar on the CPU
    mstpass::done(counter)                              a copy of it, once the loop is done

Inductor calls them as they are. So a product goes straight to where it is needed, without a second
buffer of its size and a kernel that reads and writes both; the first chunk needs no zeros to add
to; and no C++ is compiled for the arithmetic of a counter. The counter is on the CPU, where reading
it waits for no device.

Factors of half precision are added up in a total of float32 by cuBLAS itself, on CUDA.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from mstpass.graph import ops
from mstpass.graph.attention_rows import ROW_OPS, attend_rows_backward
from mstpass.graph.grouped_products import GROUPED_OPS, add_product, grouped_sums
from mstpass.graph.sizes import same_shape
from mstpass.torch_internals import host_copy_ops
from mstpass.torch_internals.graphs import own_op
from mstpass.torch_internals.inductor import call_as_it_is, call_with_aligned_result

aten = torch.ops.aten


add_product_ = own_op(
    "add_product_(Tensor(a!) total, Tensor left, Tensor right, SymInt chunk) -> ()",
    # with 0, what is there does not count: no NaN
    lambda out, left, right, chunk: add_product(out, left, right, beta=min(chunk, 1)),
    lambda *_: None,
)
counter = own_op(
    "counter(SymInt value) -> Tensor",
    lambda value: torch.full([], value, dtype=torch.int64),
    lambda value: torch.empty([], dtype=torch.int64),
)
done = own_op("done(Tensor counter) -> Tensor", torch.clone, torch.empty_like)


def call_buffer_ops_as_they_are() -> None:
    """Have Inductor call the ops, and those in place that a loop may need besides."""
    for op in (add_product_, counter, done, aten.abs_.default, *GROUPED_OPS, *ROW_OPS):
        call_as_it_is(op)
    call_with_aligned_result(host_copy_ops.COPY_ROWS)


def parts_in_place(result: fx.Node) -> list[fx.Node]:
    """The nodes of a result of a loop's body that need no buffers of their own, the result first.

    A product goes straight into the loop's buffer, if nothing else reads it. Of a sum of products
    they do so one after the other, views between them and the sum or not. Attention's backward adds
    the gradients of keys and values (``adding_attention``). Empty for other results.
    """
    if adding_attention(result) is not None:
        return [result, _item_of(result)]
    return summands(result) if len(result.users) == 1 else []


def summands(result: fx.Node) -> list[fx.Node]:
    """A result, and the products, views and sums that it is the sum of; empty for other results."""
    found: list[fx.Node] = []
    stack = [result]
    while stack:
        node = stack.pop()
        if node.op != "call_function" or (node is not result and len(node.users) != 1):
            return []
        found.append(node)
        if ops.is_view_by_shape(node):
            stack.append(node.all_input_nodes[0])
        elif _is_plain_sum(node):
            stack.extend(reversed(node.all_input_nodes))
        elif not is_product(node) or not _has_shape_of(node, result):
            return []
    return found


def _has_shape_of(product: fx.Node, result: fx.Node) -> bool:
    """Whether the buffer can be viewed as the product, by its rank; that of experts must be it."""
    shape, other = product.meta["val"].shape, result.meta["val"].shape
    if len(shape) != len(other):
        return product.target is not grouped_sums
    return same_shape(shape, other)


def is_product(node: fx.Node) -> bool:
    """Whether a loop can add the node's result to a buffer in one op."""
    factors = ops.row(node).factors
    return factors is not None and factors.adds


def is_written_in_place(result: fx.Node) -> bool:
    """Whether a result of a loop's body goes straight into the loop's buffer, which it fills."""
    return adding_attention(result) is None and bool(parts_in_place(result))


def adding_attention(result: fx.Node) -> fx.Node | None:
    """The backward of attention that adds a result of a loop's body to the loop's buffer.

    It does so if the gradients of both keys and values are results, perhaps cast.
    """
    item = _item_of(result)
    if item.target is not operator.getitem or item.args[0].target is not attend_rows_backward:  # type: ignore[union-attr]
        return None
    (source,) = item.all_input_nodes
    summed = [user for user in source.users if user.args[1] in (1, 2)]
    if item not in summed or len(summed) != 2 or not all(map(_is_result, summed)):
        return None
    return source


def item_position(result: fx.Node) -> int:
    """Which result of its op an item is, that a result of a loop's body shows."""
    position = _item_of(result).args[1]
    assert isinstance(position, int), "the position is a number"
    return position


def _item_of(result: fx.Node) -> fx.Node:
    is_cast = result.target is torch.ops.prims.convert_element_type.default
    return result.all_input_nodes[0] if is_cast else result


def _is_result(item: fx.Node) -> bool:
    """Whether the value, or its only cast, is a result of the body and nothing else."""
    while len(item.users) == 1:
        (user,) = item.users
        if user.op == "output" or _item_of(user) is not item:
            return user.op == "output"
        item = user
    return False


def _is_plain_sum(node: fx.Node) -> bool:
    """Whether the node adds two different values of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    return all(v.dtype == values[0].dtype and same_shape(v.shape, values[0].shape) for v in values)
