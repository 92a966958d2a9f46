"""Bytes of a training step on one device that do not depend on the sequence length.

With P parameters, of which the largest layer has P_layer and the modules outside of the layers
(embeddings, last norm, head) have P_rest, w bytes per weight, s bytes of optimizer states per
parameter, and R ranks::

                weights          gradients        states     gathered
    none        w P              w P              s P
    zero1       w P              w P              s P / R
    zero2       w P              w P / R          s P / R    w max(P_layer, P_rest)
    zero3       w P / R          w P / R          s P / R    w max(P_layer, P_rest)
                                                             + w (P_rest + 2 P_layer)

The stages are those of ZeRO (arXiv 1910.02054, section 5). *Gathered* tensors exist in full for a
while. Under zero2 and zero3 these are the gradients of one unit (a layer, or the modules outside of
the layers) until they are reduced. Under zero3 they are also the weights of the layer that runs, of
the next layer, which is prefetched, and of the modules outside of the layers, which stay gathered
from forward to backward (as torch's FSDP2 does with its root module).

P are the parameters that are trained. Frozen ones have neither gradients nor states; their bytes,
which quantization may make fewer than w each, add to the weights and to what zero3 gathers.

Gradients do not count as fixed: the simulated step allocates them while it runs.
"""

from __future__ import annotations

import dataclasses

from mstpass.planner.training import Training


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Weights that are not trained.

    Attributes:
        parameters: how many there are.
        layer_bytes: of those of the largest layer.
        rest_bytes: of those outside of the layers.
        each: bytes of each tensor.
    """

    parameters: int = 0
    layer_bytes: int = 0
    rest_bytes: int = 0
    each: tuple[int, ...] = dataclasses.field(default=(), repr=False)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model that are trained.

    Attributes:
        parameters: all of them.
        layer: those of the largest layer.
        rest: those outside of the layers.
        each: those of each weight tensor.
        frozen: the other ones.
    """

    parameters: int
    layer: int
    rest: int
    each: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    frozen: Frozen = Frozen()

    @property
    def of_model(self) -> int:
        """Number of all parameters."""
        return self.parameters + self.frozen.parameters

    def weight_bytes(self, training: Training) -> int:
        """Bytes of all weights."""
        return training.weight_bytes * self.parameters + sum(self.frozen.each)

    def gradient_bytes(self, training: Training) -> int:
        """Bytes of all gradients."""
        return training.weight_bytes * self.parameters


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Bytes that one device holds during the whole step; the formulas are above."""

    weights: int
    optimizer_states: int
    gathered: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer_states + self.gathered


def fixed(sizes: Sizes, training: Training) -> Fixed:
    """Bytes that one device holds besides gradients and activations.

    Master weights count as optimizer states.
    """
    w = training.weight_bytes
    gathered = 0
    if training.gradient_shards > 1:
        gathered = w * max(sizes.layer, sizes.rest)
        if training.sharding == "zero3":
            gathered += w * (sizes.rest + 2 * sizes.layer)
            gathered += sizes.frozen.rest_bytes + 2 * sizes.frozen.layer_bytes
    return Fixed(
        weights=-(-sizes.weight_bytes(training) // training.weight_shards),
        optimizer_states=int(-(-training.state_bytes * sizes.parameters // training.state_shards)),
        gathered=gathered,
    )
