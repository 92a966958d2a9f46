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
from mstpass.graph.node_meta import replacement_meta
from mstpass.graph.renew_values import CannotRenew
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.token_rules.arguments import argument
from mstpass.torch_internals.attention_kernels import CUDNN, FLASH
from mstpass.torch_internals.graphs import name_of, schema_of

aten = torch.ops.aten
WINDOW = "aten::_flash_attention_forward"


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
        self.made: list[fx.Node] = []

    def write(self, forward: fx.Node, backwards: Sequence[fx.Node]) -> None:
        """Replace the nodes."""
        graph = self.rewriting.graph
        with graph.inserting_before(forward):
            self._forward(forward)
        self._replace_items(forward, {0: self.output}, backwards)
        self._inherit(forward)
        for node in backwards:
            with graph.inserting_before(node):
                gradients = self._backward(node)
            self._replace_items(node, dict(enumerate(gradients)), ())
            self._inherit(node)
        for node in (*reversed(backwards), forward):
            for item in list(node.users):
                graph.erase_node(item)
            graph.erase_node(node)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.rewriting.builder.call(target, *args, **kwargs)
        self.made.append(node)
        return node

    def _items(self, node: fx.Node, positions: Sequence[int]) -> list[fx.Node]:
        return [self._call(operator.getitem, node, position) for position in positions]

    def _swapped(self, node: fx.Node) -> fx.Node:
        """Heads and tokens change places."""
        return self._call(aten.permute.default, node, [0, 2, 1, 3])

    def _inherit(self, old: fx.Node) -> None:
        meta = replacement_meta(old)
        for node in self.made:
            node.meta.update(meta)
        self.made = []

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
        operands = [argument(node, name) for name in ("query", "key", "value")]
        causal, scale = self.decision.band.is_causal, argument(node, "scale")
        self.lengths = self._lengths(node)
        if self.decision.kernel == FLASH:
            op = aten._scaled_dot_product_flash_attention.default
            new = self._call(op, *operands, 0.0, causal, False, scale=scale)
            self.output, self.logsumexp, *self.state = self._items(new, (0, 1, 6, 7))
        elif self.decision.kernel == CUDNN:
            op = aten._scaled_dot_product_cudnn_attention.default
            keeps = argument(node, "compute_log_sumexp")
            new = self._call(op, *operands, None, keeps, 0.0, causal, False, scale=scale)
            self.output, self.logsumexp, *self.state = self._items(new, (0, 1, 6, 7))
        else:
            self.swapped = list(map(self._swapped, operands))
            op = aten._flash_attention_forward.default
            args = (*self.swapped, None, None, *self.lengths, 0.0, False, False)
            new = self._call(op, *args, scale=scale, **self._window())
            self.inner, self.logsumexp, *self.state = self._items(new, (0, 1, 2, 3))
            self.output = self._swapped(self.inner)

    def _backward(self, node: fx.Node) -> list[fx.Node]:
        first = (
            "grad_out_"
            if name_of(node.target).endswith("efficient_attention_backward")
            else "grad_out"
        )
        gradient = argument(node, first)
        operands = [argument(node, name) for name in ("query", "key", "value")]
        causal, scale = self.decision.band.is_causal, argument(node, "scale")
        no_sequences = (None, None, *self.lengths)
        if self.decision.kernel == FLASH:
            op = aten._scaled_dot_product_flash_attention_backward.default
            args = (gradient, *operands, self.output, self.logsumexp, *no_sequences, 0.0, causal)
            return self._items(self._call(op, *args, *self.state, scale=scale), (0, 1, 2))
        if self.decision.kernel == CUDNN:
            op = aten._scaled_dot_product_cudnn_attention_backward.default
            args = (gradient, *operands, self.output, self.logsumexp, *self.state, None)
            new = self._call(op, *args, *no_sequences, 0.0, causal, scale=scale)
            return self._items(new, (0, 1, 2))
        op = aten._flash_attention_backward.default
        args = (self._swapped(gradient), *self.swapped, self.inner, self.logsumexp, *no_sequences)
        new = self._call(op, *args, 0.0, False, *self.state, scale=scale, **self._window())
        return list(map(self._swapped, self._items(new, (0, 1, 2))))

    def _window(self) -> dict[str, int]:
        band = self.decision.band
        return {
            "window_size_left": -1 if band.left is None else band.left,
            "window_size_right": -1 if band.right is None else band.right,
        }
