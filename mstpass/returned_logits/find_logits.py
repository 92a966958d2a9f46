"""Find the outputs of Dynamo's graph that are logits of a head whose loss is another output.

Terms:
    *head*: a matrix product that widens (regions/anchors.py) and from which a loss is computed with
        no further matrix product, attention or convolution in between. So the up projection of an
        MLP is no head, nor are keys and values.
    *loss*: an output of one element that requires a gradient.
    *logits*: an output that is made from the products of heads by views, casts and pointwise ops
        alone, such as a slice, a scale or a soft cap.

What the nodes compute counts, not their names (``AtenCalls``). Other outputs stay as they are.

**ATen ops.** Which ones a node stands for is found by running it on fake tensors. Dynamo's graph
calls functions of Python: ``F.linear``, ``tensor.view``, a checkpointed function, a custom autograd
function. Their names do not say what they compute, so each node is run, alone, on fake tensors of
static shapes, and the ops that reach the dispatcher are recorded. A symbolic size has its value at
the generic point (graph/sizes.py), so nothing is guarded.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mstpass.graph.joint import ancestors, descendants, tensors_of
from mstpass.graph.op_table import row_of
from mstpass.graph.sizes import generic, generic_shape, generic_stride
from mstpass.regions.anchors import WIDE_OF_ANCHOR, WIDEN
from mstpass.returned_logits.placeholder import CASTS, SAME
from mstpass.torch_internals.fake_tensors import FakeTensorMode, TorchDispatchMode
from mstpass.torch_internals.graphs import OpOverload, name_of, tree_leaves, tree_map

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AtenCall:
    """One op, the shapes of its operands, and that of its first result."""

    op: Any
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[AtenCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = _shapes(result)
        if results:  # not of questions such as prim.device
            self.calls.append(AtenCall(func, tuple(_shapes((args, kwargs or {}))), results[0]))
        return result


def _shapes(values: Any) -> list[tuple[int, ...]]:
    return [tuple(v.shape) for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


class AtenCalls:
    """The ops of the nodes of one graph; each node is run at most once."""

    def __init__(self, gm: fx.GraphModule):
        self._gm = gm
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[fx.Node, tuple[AtenCall, ...] | None] = {}

    def of(self, node: fx.Node) -> tuple[AtenCall, ...] | None:
        """The ops in the order in which they run; None if the node cannot be run on its own."""
        if node not in self._known:
            try:
                self._known[node] = self._run(node)
            except Exception as error:  # whatever the user's function raises
                log.debug("what %s computes is not known: %s", node.name, error)
                self._known[node] = None
        return self._known[node]

    def _run(self, node: fx.Node) -> tuple[AtenCall, ...]:
        with torch.no_grad(), self._mode, _Recorder() as recorder:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            recorder.calls.clear()  # the operands were made
            if node.op == "call_function":
                node.target(*args, **kwargs)  # type: ignore[operator]
            elif node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            elif node.op == "call_module":
                self._gm.get_submodule(str(node.target))(*args, **kwargs)
            else:
                raise ValueError(f"{node.name} is a {node.op}")
        return tuple(recorder.calls)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "example_value" not in node.meta:
            owner, _, name = str(node.target).rpartition(".")
            return getattr(self._gm.get_submodule(owner), name)
        return tree_map(_static, node.meta["example_value"])


def _static(value: Any) -> Any:
    """A tensor of a static shape, or a static size; any other value as it is."""
    if isinstance(value, torch.Tensor):
        shape, stride = generic_shape(value), generic_stride(value)
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.SymInt):
        return generic(value)
    if isinstance(value, torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node of Dynamo's graph; None if it is not one tensor."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def largest_of(node: fx.Node) -> torch.Tensor | None:
    """The largest floating-point tensor among a node's results."""
    floating = [t for t in tensors_of(node.meta.get("example_value")) if t.is_floating_point()]
    return max(floating, key=lambda t: generic_shape(t).numel(), default=None)


aten = torch.ops.aten

_COPIES = frozenset((*CASTS, *SAME, aten._reshape_alias.default))
_JOINS = frozenset({aten.cat.default, aten.stack.default})


def find_logits(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The outputs that are logits beside their loss, each with why that is not certain, or ""."""
    outputs = [*dict.fromkeys(one for one in returned(gm) if isinstance(one, fx.Node))]
    losses = [node for node in outputs if _is_loss(node)]
    if not losses or not torch.is_grad_enabled():
        return {}
    finder = _Finder(gm, losses)
    found = {node: finder.found(node) for node in outputs if node not in losses}
    return {node: refusal for node, refusal in found.items() if refusal is not None}


def returned(gm: fx.GraphModule) -> tuple[Any, ...]:
    """What the graph returns, in order."""
    (found,) = gm.graph.output_node().args
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def _is_loss(node: fx.Node) -> bool:
    value = value_of(node)
    if value is None or not (value.is_floating_point() and value.requires_grad):
        return False
    return all(isinstance(size, int) and size == 1 for size in value.shape)


@dataclasses.dataclass
class _Origin:
    """The matrix products that an output is made from.

    Attributes:
        numel: the elements of the smallest product.
        other: an op on the way that is neither a view, a cast nor pointwise; empty without one.
    """

    products: list[fx.Node]
    numel: float = math.inf
    other: str = ""


class _Finder:
    def __init__(self, gm: fx.GraphModule, losses: list[fx.Node]):
        self.calls = AtenCalls(gm)
        self.losses = losses

    def found(self, output: fx.Node) -> str | None:
        """The refusal of an output; None if it is not made by a head of the losses."""
        value = value_of(output)
        if value is None or not value.is_floating_point() or value.dim() < 2:
            return None
        origin = self._origin(output)
        if origin is None:
            return None
        if origin.other and generic_shape(value).numel() < WIDE_OF_ANCHOR * origin.numel:
            return None  # a value of each token, such as an entropy
        unknown = ""
        for product in origin.products:
            refusal = self._no_head(product)
            if refusal is None:
                return None
            unknown = unknown or refusal
        if origin.other:
            unknown = f"it is made from logits by {origin.other}, which is not pointwise"
        return unknown

    def _origin(self, output: fx.Node) -> _Origin | None:
        """The products that an output is made from; None if not all of them widen."""
        origin = _Origin([])
        stack, seen = [output], {output}
        while stack:
            node = stack.pop()
            if node.op in ("placeholder", "get_attr"):
                continue
            calls = self.calls.of(node)
            if calls is None:
                return None
            products = [call for call in calls if row_of(call.op).kind == "matmul"]
            if not all(map(_widens, products)):
                return None
            others = (call.op for call in calls if call not in products and _is_other(call))
            origin.other = origin.other or str(next(others, ""))
            if products:
                origin.products.append(node)
                origin.numel = min(origin.numel, *(math.prod(p.result) for p in products))
                continue
            operands = [n for n in _large_operands(node, calls) if n not in seen]
            seen.update(operands)
            stack.extend(operands)
        return origin if origin.products else None

    def _no_head(self, product: fx.Node) -> str | None:
        """Empty if the product is a head; None if it is none; else why that is not certain."""
        below = descendants([product])
        refusals = [self._between(product, below, loss) for loss in self.losses if loss in below]
        if "" in refusals:
            return ""
        return next((refusal for refusal in refusals if refusal), None)

    def _between(self, product: fx.Node, below: set[fx.Node], loss: fx.Node) -> str | None:
        """The same for one loss."""
        unknown = ""
        for node in ancestors([loss]) & below - {product}:
            calls = self.calls.of(node)
            if calls is None:
                unknown = f"mstpass cannot tell what {node.name} computes from logits"
            elif any(map(_mixes, calls)):
                return None
        return unknown


# ---- ops ---------------------------------------------------------------------------------------
def _widens(product: AtenCall) -> bool:
    factors = row_of(product.op).factors
    assert factors is not None, "the factors are known"
    left = product.operands[factors.left]
    return product.result[-1] >= WIDEN * left[-1]


def _is_other(call: AtenCall) -> bool:
    """Whether an op is neither a view, a cast nor pointwise; ops without operands do not count."""
    op = call.op
    if not call.operands or op in _COPIES or op in _JOINS:
        return False
    if isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags:
        return False
    return row_of(op).kind not in ("view", "pointwise", "create")


def _mixes(call: AtenCall) -> bool:
    """Whether an op belongs to a further layer."""
    row = row_of(call.op)
    is_convolution = name_of(call.op) == "aten::convolution"
    return row.factors is not None or row.attention is not None or is_convolution


def _large_operands(node: fx.Node, calls: Iterable[AtenCall]) -> Iterator[fx.Node]:
    """The operands with as many elements as the result; all of them, if they are joined."""
    joins = any(call.op in _JOINS for call in calls)
    result = largest_of(node)
    for operand in node.all_input_nodes:
        value = largest_of(operand)
        if value is not None and result is not None:
            if joins or generic_shape(value).numel() >= generic_shape(result).numel():
                yield operand
