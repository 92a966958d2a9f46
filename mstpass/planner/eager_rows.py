"""The rows of `mstpass plan` that run in eager mode: steps on fake tensors.

The search for the longest sequence extrapolates the peak from copies of the model with one and with
two layers: where each further layer adds the same bytes, that is the peak of the whole model. The
whole step runs at the length that is found. If its peak is another one (layers differ, or the peak
lies elsewhere in the whole step), whole steps search again from there.

Ways to train in eager that `mstpass plan` compares with mst.

Shapes: B sequences of S tokens, N = B * S, T tokens of a tile, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from mstpass.planner.eager_step import EagerStep, Loss, Recipe, eager_step
from mstpass.planner.lengths import START, longest
from mstpass.planner.models import config_of, layer_count, layers_of
from mstpass.planner.request import CHECKPOINT, EAGER, RECIPE, Report, Request, Row, silent
from mstpass.planner.room import Room, traceable
from mstpass.tracing.devices import traced_for

TILE_TOKENS, HEAD_TILES = 4096, 16  # the defaults of the MST authors' package
_LEAST_ROWS = 1024  # tokens of each sequence that a tile has at least


def plain(model: nn.Module, logits: str = "model", outputs: str = "held") -> Loss:
    """Train the model as it is.

    The loss of all recipes takes token ids, and as keywords what `shard_sequence` puts beside them
    where ranks share a sequence.

    Args:
        logits: ``"model"``: the loss as the installed transformers computes it. ``"fp32"``: as
            transformers computed it before 4.45, from a shifted copy of the logits in fp32; the
            fp32 logits are an output of the model. ``"chunked"``: the head and its loss run in
            tiles, once more in the backward, as in TRL's ``chunked_nll``.
        outputs: ``"held"``: the training loop holds the model's outputs until the backward is over.
            ``"dropped"``: it holds the loss alone.
    """
    if logits == "chunked":
        return _tiled_loss(model)
    outputs_of = functools.partial(_upcast_outputs if logits == "fp32" else _outputs, model)
    if outputs == "held":
        return outputs_of
    return lambda ids_BS, **part: outputs_of(ids_BS, **part).loss


def checkpointed(model: nn.Module, logits: str = "model", outputs: str = "held") -> Loss:
    """Train with ``torch.utils.checkpoint`` around each layer; arguments as in `plain`."""
    _checkpoint_layers(model)
    return plain(model, logits, outputs)


def minisequence(model: nn.Module, mlp_tiles: str = "kept") -> Loss:
    """Train with MST (arXiv 2407.15892): checkpointed layers, MLPs and loss in mini-sequences.

    Args:
        mlp_tiles: ``"kept"``: the layer that the backward recomputes keeps what the gradients of
            all tiles of its MLP need, as in the authors' package. ``"again"``: each tile is
            computed once more, as in ALST's ``TiledMLP`` (arXiv 2506.13996).
    """
    for layer in layers_of(model):
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module):
            forward = mlp.forward
            if mlp_tiles == "again":
                forward = functools.partial(checkpoint, forward, use_reentrant=False)
            mlp.forward = functools.partial(_tiled, forward)
    _checkpoint_layers(model)
    return _tiled_loss(model)


def _tiled_loss(model: nn.Module) -> Loss:
    """The head computes its logits once more in the backward, and adds to ``weight.grad``."""
    body: Any = model.base_model
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]

    def loss_of(ids_BS: Tensor, **part: Any) -> Tensor:
        places = {name: part[name] for name in ("position_ids", "attention_mask") if name in part}
        x_ND = body(input_ids=ids_BS, use_cache=False, **places)[0].flatten(0, 1)
        rows = -(-len(x_ND) // HEAD_TILES)
        labels_N = part.get("shift_labels", ids_BS).flatten()
        tiles = zip(x_ND.split(rows), labels_N.split(rows), strict=True)
        losses = [_HeadTile.apply(x_TD, y_T, weight) for x_TD, y_T in tiles]
        return torch.stack(losses).sum() / len(x_ND)

    return loss_of


def _checkpoint_layers(model: nn.Module) -> None:
    for layer in layers_of(model):
        recomputed = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        layer.forward = recomputed


def _tiled(forward: Callable[[Tensor], Tensor], x_BSD: Tensor) -> Tensor:
    rows = max(TILE_TOKENS // len(x_BSD), _LEAST_ROWS)
    return torch.cat([forward(x_BTD) for x_BTD in x_BSD.split(rows, dim=1)], dim=1)


class _HeadTile(Function):
    """The sum of the cross-entropies of one tile's T tokens."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, target_T: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, target_T, weight_VD)
        logits_TV = F.linear(x_TD, weight_VD).float()
        return F.cross_entropy(logits_TV, target_T, reduction="sum")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        x_TD, target_T, weight_VD = ctx.saved_tensors
        logits_TV = F.linear(x_TD, weight_VD.to(x_TD.dtype)).float()
        grad_TV = F.softmax(logits_TV, dim=-1)
        del logits_TV
        grad_TV[torch.arange(len(target_T), device=target_T.device), target_T] -= 1
        grad_TV = grad_TV.mul_(grad_outputs[0]).to(x_TD.dtype)
        if weight_VD.requires_grad:
            if weight_VD.grad is None:
                weight_VD.grad = torch.zeros_like(weight_VD)
            weight_VD.grad.addmm_(*(x.to(weight_VD.dtype) for x in (grad_TV.T, x_TD)))
        return grad_TV @ weight_VD.to(x_TD.dtype), None, None


class _Upcast(dict[str, Tensor]):
    """The outputs of a model: its logits, and the loss as an attribute."""

    loss: Tensor


def _outputs(model: nn.Module, ids_BS: Tensor, **part: Any) -> Any:
    return model(input_ids=ids_BS, **(part or {"labels": ids_BS}))


def _upcast_outputs(model: nn.Module, ids_BS: Tensor, **part: Any) -> Any:
    logits_BSV = model(input_ids=ids_BS, position_ids=part.get("position_ids")).logits.float()
    shifted_NV = logits_BSV[:, :-1].contiguous().flatten(0, 1)
    held = _Upcast(logits=logits_BSV)
    held.loss = F.cross_entropy(shifted_NV, ids_BS[:, 1:].flatten())
    return held


# ---- the rows ------------------------------------------------------------------------------------
_KEEPS = {
    EAGER: "keeps what autograd saves",
    CHECKPOINT: "keeps each layer's input; backward recomputes one layer at a time",
    RECIPE: f"keeps each layer's input; MLPs in tiles of {TILE_TOKENS} tokens, head and loss in "
    f"{HEAD_TILES} tiles",
}
_DEEP = 6  # layers from which on shallow copies take less time than the whole model


def eager_rows(room: Room, report: Report = silent) -> tuple[Row, ...]:
    """The rows of `ways`, one after the other."""
    with traced_for(None, room.request.gpu):
        config = config_of(room.request.model)
        each = ways(room.request).items()
        return tuple(_Search(room, config, recipe, report).row(name) for name, recipe in each)


def ways(request: Request) -> Mapping[str, Recipe]:
    """The ways to train in eager mode."""
    loss: dict[str, Any] = {"logits": request.logits, "outputs": request.outputs}
    return {
        EAGER: functools.partial(plain, **loss),
        CHECKPOINT: functools.partial(checkpointed, **loss),
        RECIPE: functools.partial(minisequence, mlp_tiles=request.mlp_tiles),
    }


class _Search:
    """Steps of one way to train, at any length; each runs once."""

    def __init__(self, room: Room, config: Any, recipe: Recipe, report: Report):
        self.room, self.config, self.recipe, self.report = room, config, recipe, report
        self.step_at = functools.cache(self._step_at)
        checkpoints = getattr(recipe, "func", recipe) is not plain
        self.offload = checkpoints and room.request.host_bytes > 0
        self.is_known = False  # whether shallow copies have led to the peak of the whole step

    def row(self, name: str) -> Row:
        keeps = f"{_KEEPS[name]}; these inputs wait on the host" if self.offload else _KEEPS[name]
        return self.room.searched_row(name, keeps, self.step_at, self._longest, self._curve_bytes)

    def _longest(self) -> int:
        limit, guess = self.room.step_bytes, START
        if layer_count(self.config) >= _DEEP:
            with contextlib.suppress(Exception):  # a model's own code may need all of its layers
                guess = longest(self._guessed_bytes, limit, START)
                self.is_known = guess > 0 and self._bytes(guess) == self._guessed_bytes(guess)
                if self.is_known:
                    return guess
        return longest(self._bytes, limit, guess or START)

    def _bytes(self, length: int) -> int:
        step = self.step_at(length)
        return self._with_host(self.room.parts(step).total, step.host_bytes)

    def _with_host(self, total: int, host_bytes: float) -> int:
        """Bytes that are within those of the device if a step also fits on the host."""
        if not host_bytes:
            return total
        return max(total, int(self.room.step_bytes * host_bytes / self.room.request.host_bytes))

    def _curve_bytes(self, length: int) -> int:
        if self.is_known:
            return self._guessed_bytes(length)
        return self.room.parts(self.step_at(length)).total

    def _guessed_bytes(self, length: int) -> int:
        """Each layer after the second adds what the second one adds."""
        one, two = (self._step_at(length, layers) for layers in (1, 2))
        more = layer_count(self.config) - 2
        total = two.parts.total + more * (two.parts.total - one.parts.total)
        host_bytes = two.host_bytes + more * (two.host_bytes - one.host_bytes)
        return self._with_host(max(total, self.room.at_end.total), host_bytes)

    def _step_at(self, length: int, layers: int | None = None) -> EagerStep:
        if layers != 1:
            self.report(f"eager steps: {length:,} tokens")
        request = self.room.request
        with traceable(request):
            return eager_step(
                self.config, request.training, self.recipe, length, layers, self.offload
            )
