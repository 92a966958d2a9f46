"""Attention whose mask follows from positions alone: the kernel's own flag takes its place.

A model computes its mask as a tensor wherever it cannot look at data while it is traced, so a
compiled step has a value of queries x keys, and CUDA's flash kernels, which take no mask, are out
of reach. Where a mask is proven to be a band around the diagonal (graph/bands.py):

    all true        no mask
    causal          the kernel's ``is_causal``
    a window        the window of flash attention, on devices that have it

in the forward and in its backward, in the op that the device's dispatch chooses without a mask.
``is_causal`` lets query i read keys 0 to i, from the first key on, so it fits equally many queries
and keys alone. Every query of such a band may read a key, itself, so no row of scores is empty.

Inductor drops a mask of added zeros from memory-efficient attention before
this. That op then stays: whether it had a mask, or is what the user asked for, cannot be told.

A ``FlaggedAttention`` is decided on the graph as it is. Then the op stays, with its mask left out,
or another one takes its place, with the same results up to rounding (``write_attention``). Ops
differ in the strides of their results. So what reads them is computed again, as a fake value, and
if it cannot be, no other op is written.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mstpass.byte_sizes import bytes_text
from mstpass.graph.advice import FLAG_OF_KERNEL
from mstpass.graph.attention import is_attention, is_backward, mask_of
from mstpass.graph.attention_sizes import call_of
from mstpass.graph.bands import Band, band_of
from mstpass.graph.builder import UnknownSize
from mstpass.graph.joint import JointGraph
from mstpass.graph.node_meta import source_of
from mstpass.graph.renew_values import CannotRenew
from mstpass.graph.rewriting import Rewriting
from mstpass.graph.sizes import depends_on_data, generic, hint
from mstpass.graph.token_rules.arguments import argument
from mstpass.graph.tokens import CannotTake
from mstpass.plans import Rejection
from mstpass.torch_internals.attention_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    chosen_kernel,
    has_window,
)
from mstpass.torch_internals.graphs import name_of, schema_of

log = logging.getLogger(__name__)
_LEAST_REPORTED = 2**20  # queries times keys: a smaller mask that is left is no news
_LENGTHS = "there are more keys than queries, or fewer"
_READ = "the op's results are read by others than its backward"


@dataclasses.dataclass(frozen=True)
class WithoutMasks:
    """The graph without the masks that flags replace, what was done, and what was not and why."""

    joint: JointGraph
    notes: tuple[str, ...] = ()
    rejections: tuple[Rejection, ...] = ()


def masks_as_flags(joint: JointGraph) -> WithoutMasks:
    """Replace such masks in a copy of the graph; the graph itself if it has none."""
    attention = [n for n in joint.nodes if mask_of(n) is not None and not is_backward(n)]
    decided, reasons = list[FlaggedAttention](), list[tuple[fx.Node, str]]()
    bands: _Bands = {}
    for node in attention:
        decision = _decision(joint, node, bands)
        if isinstance(decision, FlaggedAttention):
            decided.append(decision)
        elif decision:
            reasons.append((node, decision))
    new, kept = joint, decided
    try:
        new = _written(joint, decided)
    except (CannotTake, CannotRenew, UnknownSize) as error:
        log.debug("attention keeps its ops: %s", error)
        reason = f"flash attention, which has a window, does not fit: {error}"
        left = [joint.by_name[one.forward] for one in decided if one.is_window]
        reasons += [(node, reason) for node in sorted(left, key=lambda node: node.name)]
        own = lambda one: name_of(joint.by_name[one.forward].target)
        kept = [dataclasses.replace(o, kernel=own(o)) for o in decided if not o.is_window]
        new = _written(joint, kept)
    large = (each for each in reasons if math.prod(_lengths(each[0])) >= _LEAST_REPORTED)
    rejections = [_rejection(*each) for each in large]
    return WithoutMasks(new, tuple(_notes(joint, kept)), tuple(rejections))


# ---- decide --------------------------------------------------------------------------------------
# Layers that are alike share what was found.
_Bands = dict[tuple[fx.Node, int, int], Band | str]


def _decision(joint: JointGraph, node: fx.Node, bands: _Bands) -> FlaggedAttention | str:
    """What becomes of an attention op, or why it stays; empty if its mask depends on data."""
    query, key, _ = _operands(node)
    mask = mask_of(node)
    if mask is None or depends_on_data(query) or depends_on_data(key):
        return ""
    queries, keys = generic(query.shape[-2]), generic(key.shape[-2])
    if (mask, queries, keys) not in bands:
        bands[mask, queries, keys] = band_of(joint, mask, query, key)
    band = bands[mask, queries, keys]
    if isinstance(band, str):
        return band and f"the mask is no flag of a kernel: {band}"
    if not band.is_all and queries != keys:
        return f"the mask is {band}, but {_LENGTHS}"
    backwards = _backwards(joint, node)
    if backwards is None:
        return f"the mask is {band}, but {_READ}"
    kernel = _kernel(node, band)
    if kernel is None:
        return f"the mask is {band}, which {_short(name_of(node.target))} has no flag for"
    return FlaggedAttention(node.name, backwards, band, kernel)


def _operands(node: fx.Node) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (argument(node, n).meta["val"] for n in ("query", "key", "value"))
    return query, key, value


def _backwards(joint: JointGraph, node: fx.Node) -> tuple[str, ...] | None:
    """The backwards of an attention op; None if one has another mask."""
    readers = {user for item in node.users for user in item.users}
    found = [n for n in joint.sorted(readers) if is_attention(n) and is_backward(n)]
    found = [n for n in found if name_of(n.target) == f"{name_of(node.target)}_backward"]
    own = (argument(n, "out") in node.users and mask_of(n) is mask_of(node) for n in found)
    return tuple(n.name for n in found) if all(own) else None


def _kernel(node: fx.Node, band: Band) -> str | None:
    """The op that computes attention with the band's flag; None if the device has none."""
    operands, scale = _operands(node), argument(node, "scale")
    has_dropout = argument(node, "dropout_p") != 0
    if band.is_all or band.is_causal:
        own = name_of(node.target)
        if has_dropout or own not in (EFFICIENT, CUDNN):
            return own
        chosen = chosen_kernel(*operands, band.is_causal, scale)
        return chosen if chosen in (FLASH, CUDNN) else own
    has_every_key = (band.left or 0) >= 0 and (band.right or 0) >= 0  # each query reads its own
    return WINDOW if has_every_key and not has_dropout and has_window(*operands, scale) else None


# ---- say -----------------------------------------------------------------------------------------
def _notes(joint: JointGraph, decided: Sequence[FlaggedAttention]) -> Iterator[str]:
    """One line for each kind of mask that a flag replaces."""
    for (band, kernel), count in Counter((one.band, one.kernel) for one in decided).items():
        one = next(one for one in decided if (one.band, one.kernel) == (band, kernel))
        node = joint.by_name[one.forward]
        flag = "causal flag" if band.is_causal else "window"
        instead = "it is left out" if band.is_all else f"the {flag} of {_short(kernel)} replaces it"
        ops = f"{count} attention ops" if count > 1 else "an attention op"
        queries, keys = _lengths(node)
        size = bytes_text(_mask_bytes(node))
        yield (
            f"the mask of {ops} is proven to be {band}: {instead}, and its {queries} x {keys} "
            f"values, {size}, are not built"
        )


def _lengths(node: fx.Node) -> tuple[int, int]:
    query, key, _ = _operands(node)
    return hint(query.shape[-2]), hint(key.shape[-2])


def _mask_bytes(node: fx.Node) -> int:
    """The bytes of the mask, which heads, and sequences, may share."""
    mask = call_of(node).operand("attn_mask") or call_of(node).operand("attn_bias")
    sizes = () if mask is None else zip(mask.shape, mask.stride, strict=True)
    itemsize = 0 if mask is None else mask.dtype.itemsize
    return itemsize * math.prod(size for size, stride in sizes if stride)


def _rejection(node: fx.Node, reason: str) -> Rejection:
    mask = mask_of(node)
    name = node.name if mask is None else mask.name
    return Rejection("detect", name, FLAG_OF_KERNEL(reason), source_of(node), _mask_bytes(node))


def _short(op: str) -> str:
    return op.removeprefix("aten::").removeprefix("_scaled_dot_product").strip("_")


# ---- write ---------------------------------------------------------------------------------------
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


@dataclasses.dataclass(frozen=True)
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

    @property
    def is_window(self) -> bool:
        return self.kernel == WINDOW


def _written(joint: JointGraph, decided: Sequence[FlaggedAttention]) -> JointGraph:
    """The decisions applied to a copy of the graph; the graph itself if there are none.

    Raises:
        CannotTake, CannotRenew, UnknownSize: an op that is not the graph's own does not fit.
    """
    if not decided:
        return joint
    rewriting = Rewriting(joint)
    for one in decided:
        forward, *backwards = (rewriting.joint.by_name[n] for n in (one.forward, *one.backwards))
        if one.kernel == name_of(forward.target):
            flags = {"attn_mask": None, "attn_bias": None, "is_causal": one.band.is_causal}
            for node in (forward, *backwards):
                _set_arguments(node, flags)
        else:
            _write(rewriting, one, forward, backwards)
    return rewriting.finished()


def _set_arguments(node: fx.Node, changes: Mapping[str, Any]) -> None:
    for position, known in enumerate(schema_of(node.target).arguments):  # type: ignore[arg-type]
        if known.name not in changes:
            continue
        if position < len(node.args) and not known.kwarg_only:
            node.update_arg(position, changes[known.name])
        else:
            node.update_kwarg(known.name, changes[known.name])


def _write(
    rewriting: Rewriting, one: FlaggedAttention, forward: fx.Node, backwards: Sequence[fx.Node]
) -> None:
    """Write another op for an attention op and its backwards."""
    call, band = rewriting.builder.call, one.band
    of_forward, of_backward = _OPS[one.kernel]
    how = {"scale": argument(forward, "scale")}
    first: tuple[Any, ...] = ()

    def laid_out(node: fx.Node) -> fx.Node:
        """A value as the op has it: where windows are, heads and tokens change places."""
        return call(aten.permute.default, node, [0, 2, 1, 3]) if one.is_window else node

    def results(node: fx.Node, *positions: int) -> list[fx.Node]:
        return [call(operator.getitem, node, position) for position in positions]

    with rewriting.before(forward):
        operands = [laid_out(argument(forward, n)) for n in ("query", "key", "value")]
        lengths = rewriting.sizes.arguments(t.shape[-2] for t in _operands(forward)[:2])
        if one.is_window:
            first = (None, None, *lengths)
            how["window_size_left"] = -1 if band.left is None else band.left
            how["window_size_right"] = -1 if band.right is None else band.right
        elif one.kernel == CUDNN:
            first = (None, argument(forward, "compute_log_sumexp"))
        new = call(of_forward, *operands, *first, 0.0, band.is_causal, False, **how)
        inner, logsumexp, *state = results(new, 0, 1, *((2, 3) if one.is_window else (6, 7)))
        _replace_items(rewriting, forward, [laid_out(inner)], backwards)
    rest = (None, None, *lengths, 0.0, band.is_causal)
    rest = (*state, None, *rest) if one.kernel == CUDNN else (*rest, *state)
    for node in backwards:
        name = "grad_out_" if "efficient" in name_of(node.target) else "grad_out"
        with rewriting.before(node):
            gradient = laid_out(argument(node, name))
            made = call(of_backward, gradient, *operands, inner, logsumexp, *rest, **how)
            _replace_items(rewriting, node, list(map(laid_out, results(made, 0, 1, 2))), ())
    for node in (*reversed(backwards), forward):
        for item in list(node.users):
            rewriting.graph.erase_node(item)
        rewriting.graph.erase_node(node)


def _replace_items(
    rewriting: Rewriting, old: fx.Node, new: Sequence[fx.Node], backwards: Sequence[fx.Node]
) -> None:
    """Give the readers of an op's first results those of the new one; backwards have their own."""
    for item in list(old.users):
        position: Any = item.args[1]
        readers = [user for user in item.users if user not in backwards]
        if position < len(new):
            rewriting.replace(item, new[position], readers)
        elif readers:
            raise CannotTake(readers[0], "it reads a result that the op does not have")
