"""Write attention ops, and their backwards, with a kernel's flag in the place of a mask.

The op stays, with its mask left out, or another one takes its place, with the same results up to
rounding. Ops differ in the strides of their results. So what reads them is computed again, as a
fake value, and if it cannot be, no other op is written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mstpass.graph.bands import Band
from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.renew_values import CannotRenew
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.token_rules.arguments import argument
from mstpass.torch_internals.attention_kernels import CUDNN, FLASH
from mstpass.torch_internals.graphs import name_of, schema_of

aten = torch.ops.aten
WINDOW = "aten::_flash_attention_forward"
_OPS = {
    FLASH: (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
    ),
    CUDNN: (
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    ),
    WINDOW: (aten._flash_attention_forward.default, aten._flash_attention_backward.default),
}


class CannotReplace(Exception):
    """Another op does not fit into the graph; the message says why."""


@dataclass(frozen=True)
class FlaggedAttention:
    """An attention op whose mask becomes a flag.

    Attributes:
        forward: the name of the op's node.
        backwards: the names of its backwards.
        band: what the mask is.
        kernel: the name of the op that is written, without an overload.
    """

    forward: str
    backwards: tuple[str, ...]
    band: Band
    kernel: str

    def with_op(self, op: str) -> FlaggedAttention:
        """The same with the op that the graph has, if that has the flag as well."""
        return replace(self, kernel=op) if self.band.is_all or self.band.is_causal else self


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask that an attention op, or its backward, is given."""
    name = _mask_argument(node)
    mask = argument(node, name) if name else None
    return mask if isinstance(mask, fx.Node) else None


def _mask_argument(node: fx.Node) -> str:
    """What the op's schema calls its mask; ``""`` if it takes none."""
    names = [known.name for known in schema_of(node.target).arguments]  # type: ignore[arg-type]
    return next((name for name in ("attn_mask", "attn_bias") if name in names), "")


def write_attention(joint: JointGraph, decided: Sequence[FlaggedAttention]) -> JointGraph:
    """Apply the decisions to a copy of the graph.

    Raises:
        CannotReplace: an op that is not the graph's own does not fit.
    """
    rewriting = Rewriting(joint)
    joint = rewriting.joint
    for one in decided:
        forward = joint.by_name[one.forward]
        backwards = [joint.by_name[name] for name in one.backwards]
        if one.kernel == name_of(forward.target):
            for node in (forward, *backwards):
                _set_arguments(node, {_mask_argument(node): None, "is_causal": one.band.is_causal})
            continue
        _Writer(rewriting, one).write(forward, backwards)
    try:
        return rewriting.finished()
    except CannotRenew as error:
        raise CannotReplace(str(error)) from error


def _set_arguments(node: fx.Node, changes: Mapping[str, Any]) -> None:
    for position, known in enumerate(schema_of(node.target).arguments):  # type: ignore[arg-type]
        if known.name not in changes:
            continue
        if position < len(node.args) and not known.kwarg_only:
            node.update_arg(position, changes[known.name])
        else:
            node.update_kwarg(known.name, changes[known.name])


class _Writer:
    """Writes another op for one attention op and its backwards."""

    def __init__(self, rewriting: Rewriting, decision: FlaggedAttention):
        self.rewriting, self.decision = rewriting, decision
        self._call = rewriting.builder.call

    def write(self, forward: fx.Node, backwards: Sequence[fx.Node]) -> None:
        """Replace the nodes."""
        graph = self.rewriting.graph
        with self.rewriting.before(forward):
            self._forward(forward)
        self._replace_items(forward, {0: self.output}, backwards)
        for node in backwards:
            with self.rewriting.before(node):
                gradients = self._backward(node)
            self._replace_items(node, dict(enumerate(gradients)), ())
        for node in (*reversed(backwards), forward):
            for item in list(node.users):
                graph.erase_node(item)
            graph.erase_node(node)

    def _items(self, node: fx.Node, positions: Sequence[int]) -> list[fx.Node]:
        return [self._call(operator.getitem, node, position) for position in positions]

    def _laid_out(self, node: fx.Node) -> fx.Node:
        """A value as the op has it: where windows are, heads and tokens change places."""
        if self.decision.kernel != WINDOW:
            return node
        return self._call(aten.permute.default, node, [0, 2, 1, 3])

    def _replace_items(
        self, old: fx.Node, new: Mapping[int, fx.Node], backwards: Sequence[fx.Node]
    ) -> None:
        """Give the readers of an op's results those of the new one."""
        for item in list(old.users):
            position = item.args[1]
            readers = [user for user in item.users if user not in backwards]
            if readers and position not in new:
                raise CannotReplace(f"{readers[0].name} reads a result that the op does not have")
            if isinstance(position, int) and position in new:
                self.rewriting.replace(item, new[position], readers)

    def _lengths(self, node: fx.Node) -> list[int | fx.Node]:
        query, key = (value_of(argument(node, name)) for name in ("query", "key"))
        assert query is not None and key is not None, "the query and key are known"
        try:
            return self.rewriting.sizes.arguments([query.shape[-2], key.shape[-2]])
        except UnknownSize as error:
            raise CannotReplace(str(error)) from error

    # ---- the ops ---------------------------------------------------------------------------------
    def _forward(self, node: fx.Node) -> None:
        kernel, band = self.decision.kernel, self.decision.band
        self.operands = [self._laid_out(argument(node, n)) for n in ("query", "key", "value")]
        self.lengths, self.how = self._lengths(node), {"scale": argument(node, "scale")}
        first: tuple[Any, ...] = ()
        if kernel == WINDOW:
            first = (None, None, *self.lengths)
            self.how["window_size_left"] = -1 if band.left is None else band.left
            self.how["window_size_right"] = -1 if band.right is None else band.right
        elif kernel == CUDNN:
            first = (None, argument(node, "compute_log_sumexp"))
        op, _ = _OPS[kernel]
        new = self._call(op, *self.operands, *first, 0.0, band.is_causal, False, **self.how)
        state = (2, 3) if kernel == WINDOW else (6, 7)
        self.inner, self.logsumexp, *self.state = self._items(new, (0, 1, *state))
        self.output = self._laid_out(self.inner)

    def _backward(self, node: fx.Node) -> list[fx.Node]:
        is_efficient = name_of(node.target).endswith("efficient_attention_backward")
        gradient = self._laid_out(argument(node, "grad_out_" if is_efficient else "grad_out"))
        rest = (None, None, *self.lengths, 0.0, self.decision.band.is_causal)
        is_cudnn = self.decision.kernel == CUDNN
        rest = (*self.state, None, *rest) if is_cudnn else (*rest, *self.state)
        _, op = _OPS[self.decision.kernel]
        args = (gradient, *self.operands, self.inner, self.logsumexp, *rest)
        gradients = self._items(self._call(op, *args, **self.how), (0, 1, 2))
        return list(map(self._laid_out, gradients))
