"""transformers' Trainer, and TRL's SFT, on ranks that share each sequence.

A trainer gives every rank other rows, and takes each rank's loss for one of whole rows. Here R
ranks share the rows of a data-parallel rank, and each computes its part of the tokens:

=========================  =======================================================================
``prepare_data_loader``    of its accelerator: the ranks of a sequence get the same batches, and an
                           epoch has as many steps as the sequences need
``get_batch_samples``      labels are shifted, and left out at padding, before they are counted
``get_cp_size``            R. Trainer divides by it what it adds up over ranks with the same batch,
                           so ``num_items_in_batch`` counts each label once
``compute_loss``           calls the model with this rank's part. Trainer multiplies the loss by the
                           number of ranks, so that DDP's mean of gradients, and the mean that is
                           logged, are those of whole sequences. In evaluation it is the whole
                           sequence's loss
``gather_for_metrics``     of its accelerator: rows, of which R ranks have copies, once; numbers of
                           each rank's part, of all ranks
=========================  =======================================================================

They are exchanged for this trainer alone. ``ParallelismConfig`` cannot say it by name: Accelerate
1.15 knows one implementation of ``sp_size``, DeepSpeed's, and one of ``cp_size``, torch's, which
replaces scaled_dot_product_attention under FSDP2, and it refuses other names.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mstpass.sequences.attention import Method
from mstpass.sequences.batch import labels_that_count, shard_sequence
from mstpass.sequences.huggingface import CAUSAL_LOSS, has_own_loss, loss_of, sequence_parallel
from mstpass.sequences.ranks import Group, Ranks, ranks_of, sum_over
from mstpass.trainers.exchange import TrainerError, computes_loss, loss_besides_model, with_globals
from mstpass.trainers.trl_head import base_model


def share_sequences(trainer: Any, group: Group, method: Method, head_groups: int) -> str:
    """Let the ranks of the group share the sequences of each batch; in place.

    Args:
        trainer: whose loss is one of separate tokens, from a model that is called once a step.
        group: the ranks that share a sequence; None for all ranks.

    Returns:
        what was done, as a part of a sentence.

    Raises:
        TrainerError: the trainer, or how it was started, does not allow it.
        ValueError: the model does not.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise TrainerError(
            "sequence_parallel needs the ranks that share a sequence, and this trainer runs in one "
            "process: start it with torchrun --nproc-per-node, or leave sequence_parallel out"
        )
    ranks = ranks_of(group)
    sequences = _sequences(ranks)
    sequence_parallel(trainer.model, group, method, head_groups)
    _share_batches(trainer.accelerator, sequences, ranks)
    _share_loss(trainer, ranks)
    of = f"{len(sequences)} sequences at a time, each" if len(sequences) > 1 else "each sequence"
    return f"{of} on {ranks.size} ranks"


def check_shares(trainer: Any) -> None:
    """Refuse a trainer whose ranks cannot share sequences.

    Raises:
        TrainerError: with the first reason.
    """
    for said, reason in _refused(trainer):
        raise TrainerError(f"sequence_parallel and {said}: {reason}")


def _refused(trainer: Any) -> Iterator[tuple[str, str]]:
    arguments, accelerator = trainer.args, trainer.accelerator
    reader = loss_besides_model(trainer)
    of_trl = computes_loss(trainer).__module__.startswith("trl.")
    if reader and not (of_trl and reader == "SFTTrainer.compute_loss"):  # SFT's goes token by token
        yield (
            reader,
            "it reads what the model returns of whole sequences, and each rank has its part. Leave "
            "one of them out; or write the loss of a part in a loop of your own, with "
            "mstpass.sequence_parallel and mstpass.shard_sequence",
        )
    if trainer.compute_metrics is not None:
        yield (
            "compute_metrics",
            "metrics read logits of whole sequences, and each rank has those of its part. Leave "
            "compute_metrics out, so that evaluation reports the loss, or leave sequence_parallel "
            "out",
        )
    config = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(config, f"{name}_size", 1) for name in ("tp", "cp", "sp")}
    taken = [f"{name}_size={size}" for name, size in sizes.items() if size > 1]
    if taken or trainer.get_tp_size() > 1:
        yield (
            f"ParallelismConfig({', '.join(taken) or 'tp_size'})",
            "both divide what a rank computes. Leave out one of them",
        )
    if trainer.is_deepspeed_enabled:
        yield (
            "DeepSpeed",
            "its engine has an Ulysses of its own, ParallelismConfig(sp_size=...). Take that, or "
            "DDP or FSDP in the place of DeepSpeed",
        )
    if accelerator.dispatch_batches:
        yield (
            "dispatch_batches=True",
            "one process would hand each rank other rows, and the ranks of a sequence need the "
            "same ones. Leave dispatch_batches out: each rank then reads the data itself",
        )
    if str(arguments.include_num_input_tokens_seen).lower() not in ("no", "false"):
        yield (
            "include_num_input_tokens_seen",
            "the trainer would count each token once for every rank. Leave it out",
        )
    if getattr(trainer, "aux_loss_enabled", False):
        yield (
            "router_aux_loss_coef",
            "a load-balancing loss is of all tokens of a batch, and each rank has a part. "
            "Give router_aux_loss_coef=0.0",
        )
    kind = type(trainer.model).__name__
    if not trainer.model_accepts_loss_kwargs or has_own_loss(base_model(trainer.model)):
        yield (
            kind,
            "the model averages its loss over its own labels, of which each rank has another "
            "number. Take a model whose loss is transformers' (it takes num_items_in_batch)",
        )


def _sequences(ranks: Ranks) -> list[tuple[int, ...]]:
    """The ranks of each sequence, for all sequences of a batch."""
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, tuple(ranks.members))
    sequences = sorted(set(each))
    if sum(len(members) for members in sequences) != len(each):
        raise TrainerError(
            f"the groups of sequence_parallel, {sequences}, must hold each of {len(each)} ranks "
            "once: give every rank the group that it is in, such as mesh['sequence']"
        )
    return sequences


def _share_batches(accelerator: Any, sequences: list[tuple[int, ...]], ranks: Ranks) -> None:
    """Give all ranks of a sequence the same rows, and gather these rows once."""
    from accelerate.data_loader import prepare_data_loader

    which = {
        "num_processes": len(sequences),
        "process_index": sequences.index(tuple(ranks.members)),
        "dispatch_batches": False,
        "torch_device_mesh": None,
    }

    def prepare(loader: Any, device: Any, **how: Any) -> Any:
        return prepare_data_loader(loader, device, **{**how, **which})

    own = type(accelerator).prepare_data_loader
    exchanged = with_globals(own, {"prepare_data_loader": prepare})
    accelerator.prepare_data_loader = types.MethodType(exchanged, accelerator)
    first_ranks = [members[0] for members in sequences]

    def gather_for_metrics(value: Tensor, use_gather_object: bool = False) -> Tensor:
        gathered: Tensor = accelerator.gather(value)
        if value.dim() == 0:
            return gathered
        rows = gathered.unflatten(0, (-1, value.shape[0]))[first_ranks].flatten(0, 1)
        state = accelerator.gradient_state
        repeated = state.end_of_dataloader and state.remainder > 0  # to fill the last batch up
        return rows[: state.remainder] if repeated else rows

    accelerator.gather_for_metrics = gather_for_metrics


def _share_loss(trainer: Any, ranks: Ranks) -> None:
    causal = loss_of(base_model(trainer.model)) == CAUSAL_LOSS
    own_samples, own_loss = trainer.get_batch_samples, trainer.compute_loss
    own_step, own_flops = trainer.prediction_step, trainer.floating_point_ops

    def whole(batch: Any) -> dict[str, Any]:
        """The batch, with the labels that its parts will have."""
        labels = labels_that_count(batch, causal)
        name = "shift_labels" if causal else "labels"
        return dict(batch) if labels is None else {**batch, name: labels}

    def get_batch_samples(batches: Iterator[Any], number: int, device: torch.device) -> Any:
        return own_samples(map(whole, batches), number, device)

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        def of_part(**batch: Any) -> Any:
            return model(**shard_sequence(batch, ranks.group, gradients="sum", causal=causal))

        if torch.is_grad_enabled():
            return own_loss(of_part, inputs, return_outputs, num_items_in_batch)
        (inputs,), count = get_batch_samples(iter([inputs]), 1, trainer.args.device)
        found = own_loss(of_part, inputs, return_outputs, count)
        loss, *outputs = found if return_outputs else (found,)
        mean = sum_over(loss.detach(), ranks) / ranks.size
        return (mean, *outputs) if return_outputs else mean

    def prediction_step(
        model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if not prediction_loss_only or "labels" not in inputs:
            raise TrainerError(
                "sequence_parallel and predictions: each rank has the logits of its part of the "
                "tokens. Evaluate the loss, with labels and prediction_loss_only=True; or compile "
                "a second trainer without sequence_parallel"
            )
        return own_step(model, inputs, prediction_loss_only, ignore_keys)

    trainer.get_batch_samples = get_batch_samples
    trainer.compute_loss = compute_loss
    trainer.prediction_step = prediction_step
    trainer.gather_function = trainer.accelerator.gather_for_metrics  # it has the former one
    trainer.get_cp_size = lambda: ranks.size
    trainer.floating_point_ops = lambda inputs: own_flops(inputs) / ranks.size
    if hasattr(trainer, "_tp_size"):  # TRL's SFT: how many ranks count the same tokens
        trainer._tp_size *= ranks.size
