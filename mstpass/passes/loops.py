"""Whether the body of a loop is as pure as ``mst_loop`` claims, and fits the loop's operands.

pure    nothing is written but what the body has made itself; no rank waits for another
fits    one input for each operand, with its shape and dtype; results as the loop says

A body has the symbolic sizes of the batch that was traced (loops/body/build.py).

The strides of a body's inputs are those of rows of their own. The lowering traces the body again,
with those of the operands, so ops in it that need others copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph.collectives import is_collective, is_wait
from mstpass.graph.joint import tensors_of, value_of
from mstpass.graph.loop_op import START, stacked_dim
from mstpass.graph.sizes import hint_shape
from mstpass.passes.values import difference, layout_difference
from mstpass.torch_internals.fake_tensors import storage_key
from mstpass.torch_internals.graphs import OpOverload, schema_of


def body_differences(loop: fx.Node, body: fx.Graph) -> Iterator[str]:
    """What is wrong with the body of a loop."""
    for node in body.nodes:
        if is_collective(node) or is_wait(node):
            yield f"its body exchanges data between ranks ({node.name})"
        elif _writes_to_operand(node, body):
            yield f"its body writes to an operand ({node.name})"
        elif found := difference(node, storages=False):  # the lowering traces it anew
            yield f"{node.name} in its body {found}"
    yield from _operand_differences(loop, body)
    yield from _result_differences(loop, body)


def _writes_to_operand(node: fx.Node, body: fx.Graph) -> bool:
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    given = {
        storage_key(tensor.untyped_storage())
        for operand in body.find_nodes(op="placeholder")
        for tensor in tensors_of(operand.meta.get("val"))
    }
    written = (
        argument
        for known, argument in zip(schema_of(node.target).arguments, node.args, strict=False)
        if known.alias_info is not None and known.alias_info.is_write
    )
    tensors = (t for n in written if isinstance(n, fx.Node) for t in tensors_of(n.meta.get("val")))
    return any(storage_key(tensor.untyped_storage()) in given for tensor in tensors)


def _operand_differences(loop: fx.Node, body: fx.Graph) -> Iterator[str]:
    _, num_chunks, *_, sliced, whole = _values(loop.args)
    inputs = [node.meta.get("val") for node in body.find_nodes(op="placeholder")]
    if num_chunks is None:
        inputs = inputs[1:]  # the length of the chunk
    if any(node.target == START for node in body.find_nodes(op="placeholder")):
        inputs = inputs[1:]
    if len(inputs) - len(sliced) - len(whole) not in (0, 1):  # one more says which rows are valid
        yield f"its body has {len(inputs)} inputs for {len(sliced) + len(whole)} operands"
        return
    for given, taken in zip((*sliced, *whole), inputs, strict=False):
        if not isinstance(given, torch.Tensor) or not isinstance(taken, torch.Tensor):
            continue
        rows = taken.shape[0] if any(given is value for value in sliced) else None
        chunk = given if rows is None else _rows_like(given, taken)
        if chunk is None:
            yield "its body has an input of another shape than its operand's chunks"
        elif found := layout_difference(taken, chunk, of_traced_batch=True):
            yield f"an input of its body: {found}"


def _rows_like(given: torch.Tensor, taken: torch.Tensor) -> torch.Tensor | None:
    """A chunk of an operand with as many rows as an input of the body."""
    if given.dim() != taken.dim():
        return None
    mode: Any = given.fake_mode  # type: ignore[attr-defined]
    shape = (taken.shape[0], *given.shape[1:])
    with mode:
        return torch.empty_strided(shape, given.stride(), dtype=given.dtype, device=given.device)


def _result_differences(loop: fx.Node, body: fx.Graph) -> Iterator[str]:
    specs = _values(loop.args)[4]
    (results,) = body.output_node().args
    parts = [part for n in results if (part := value_of(n)) is not None]  # type: ignore
    returned = list(tensors_of(loop.meta.get("val")))
    if not len(parts) == len(specs) == len(returned):
        yield f"its body returns {len(parts)} values of {len(specs)}"
        return
    for (kind, _, dtype), part, result in zip(specs, parts, returned, strict=True):
        shapes = [list(hint_shape(value)) for value in (part, result)]
        dim = stacked_dim(kind)
        if dim is not None:
            shapes[0][dim] = shapes[1][dim]
        if shapes[0] != shapes[1]:
            yield f"its body returns {tuple(part.shape)} for a result {tuple(result.shape)}"
        is_summand = dim is None and torch.promote_types(part.dtype, dtype) == part.dtype
        if dtype != result.dtype or not (part.dtype == dtype or is_summand):
            yield f"its body returns {part.dtype} for a result of {result.dtype}"


def _values(args: Any) -> Any:
    return fx.map_arg(args, lambda node: node.meta.get("val"))
