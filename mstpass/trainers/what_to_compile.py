"""`compile_trainer`: compiles, in a trainer that exists, what each of its steps runs."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mstpass import compiling
from mstpass.integrations.transformers_masks import says_whether_packed
from mstpass.options import Options
from mstpass.sequences.attention import Method
from mstpass.sequences.ranks import Group
from mstpass.trainers.exchange import TrainerError, computes_loss, loss_besides_model
from mstpass.trainers.shared_sequences import check_shares, share_sequences
from mstpass.trainers.trl_head import KNOWN_VERSIONS, compile_fused_head, has_fused_head

_LANGUAGE_MODELS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")


def compile_trainer(
    trainer: Any,
    *,
    dynamic: bool | None = None,
    sequence_parallel: bool | Group = False,
    method: Method = "auto",
    head_groups: int = 1,
    **options: Any,
) -> str:
    """Compile what a trainer runs in each step, with its LM head and loss in chunks; in place.

    Args:
        trainer: a ``transformers.Trainer``, or one of TRL's trainers, before ``train()``.
        dynamic: as for ``torch.compile``: True, if the lengths of batches vary.
        sequence_parallel: True, if all ranks share each sequence, or the process group or device
            mesh of this rank's sequence, as of `mstpass.sequence_parallel`: each rank then computes
            a part of its tokens. For transformers' Trainer with the model's own loss, and TRL's
            SFT.
        method: as for `mstpass.sequence_parallel`, how attention exchanges between these ranks.
        head_groups: likewise.
        options: the options of the backend, as in ``torch.compile(..., options=...)``.

    Returns:
        what was compiled, as a sentence.

    Raises:
        TrainerError: the trainer is set up so that its head cannot run in chunks, or TRL has a
            version that mstpass does not know, or its ranks cannot share sequences. The message
            says what to change.
        ValueError: the model's sequences cannot be shared.
        OptionError: an option has an unknown name or a bad value.
    """
    Options.parse(options)
    _refuse_two_compilers(trainer)
    compiled = functools.partial(torch.compile, backend="mst", dynamic=dynamic, options=options)
    shared = ""
    if sequence_parallel is not False and sequence_parallel is not None:
        check_shares(trainer)
        group = None if sequence_parallel is True else sequence_parallel
        shared = f"; {share_sequences(trainer, group, method, head_groups)}"
    elif (method, head_groups) != ("auto", 1):
        raise TrainerError(
            f"method={method!r} and head_groups={head_groups} say how ranks share a sequence, and "
            "sequence_parallel is not given: add sequence_parallel=True, or leave them out"
        )
    return _compiled(trainer, compiled, dynamic, options) + shared


def _compiled(trainer: Any, compiled: Any, dynamic: bool | None, options: dict[str, Any]) -> str:
    """Compile what fits the trainer, and say what it was."""
    fused = has_fused_head(trainer.model)
    if fused and _calls_fused_head(trainer):
        compile_fused_head(trainer.model, compiled, _entropy_has_gradient(trainer))
        return (
            "TRL's fused LM head, with the model: log-probabilities and metrics of all tokens in "
            "chunks; generation, evaluation and reference models run as before"
        )
    if not fused and _is_of_trl(trainer, _LANGUAGE_MODELS):
        raise TrainerError(
            f"mstpass.compile_trainer knows TRL {KNOWN_VERSIONS}, where the model of a "
            f"{type(trainer).__name__} has a fused LM head; the model of this one has none. "
            f"Install trl=={KNOWN_VERSIONS}.*."
        )
    if not loss_besides_model(trainer) or _is_of_trl(trainer, ("RewardTrainer",)):
        compiling.compile(trainer.model, dynamic=dynamic, **options)
        return "the model; where it returns a loss, training does not keep its logits"
    return _compile_loss(trainer, compiled)


def _compile_loss(trainer: Any, compiled: Any) -> str:
    """Compile ``trainer.compute_loss``; where it returns outputs too, it stays as it is."""
    own = trainer.compute_loss
    whole = says_whether_packed(trainer.model, compiled(own), own)

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if return_outputs or not torch.is_grad_enabled():
            return own(model, inputs, return_outputs=return_outputs, **kwargs)
        return whole(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    return "compute_loss: the model together with the loss that is computed from its outputs"


def _calls_fused_head(trainer: Any) -> bool:
    """Whether ``compute_loss`` is one of TRL's that do, or goes on to one.

    A trainer that is built on SFT's has the head and may not call it, as TRL's GKD.
    """
    kind = computes_loss(trainer)
    calls_super = "super" in kind.compute_loss.__code__.co_names
    return kind.__name__ in _LANGUAGE_MODELS or calls_super


def _entropy_has_gradient(trainer: Any) -> bool:
    """Whether the loss depends on the entropy: in GRPO with an entropy bonus."""
    return bool(getattr(trainer, "_entropy_bonus_enabled", False))


def _refuse_two_compilers(trainer: Any) -> None:
    arguments = getattr(trainer, "args", None)
    if arguments is None:
        raise TrainerError(
            f"{type(trainer).__name__} has no training arguments: give compile_trainer a trainer, "
            "and a model to mstpass.compile"
        )
    if arguments.torch_compile:
        raise TrainerError(
            f"torch_compile=True (torch_compile_backend={arguments.torch_compile_backend!r}) and "
            "mstpass.compile_trainer would both compile this trainer's model. Leave torch_compile "
            "and torch_compile_backend out; compile_trainer takes mst's options as arguments."
        )
    if getattr(arguments, "use_liger_kernel", False):
        raise TrainerError(
            "use_liger_kernel=True and mstpass.compile_trainer: Liger's layers are kernels that a "
            "graph cannot look into, so mst finds no MLP and no head. Leave use_liger_kernel out."
        )


def _is_of_trl(trainer: Any, names: tuple[str, ...]) -> bool:
    kinds = type(trainer).__mro__
    return any(kind.__name__ in names and kind.__module__.startswith("trl.") for kind in kinds)
