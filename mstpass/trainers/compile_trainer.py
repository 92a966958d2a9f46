"""`compile_trainer`: compiles, in a trainer that exists, what each of its steps runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from mstpass.options import Options
from mstpass.trainers import logits_stand_in, losses
from mstpass.trainers.exchange import TrainerError, with_calls_exchanged
from mstpass.trainers.through_wrapper import call_inside

LOGPS = "_get_per_token_logps_and_entropies"
BACKEND = "mst"


def compile_trainer(trainer: Any, **options: Any) -> tuple[str, ...]:
    """Compile what a trainer runs in each step, with its LM head and loss in chunks; in place.

    Args:
        trainer: a ``transformers.Trainer``, or one of TRL's trainers, before ``train()``.
        options: the options of the backend, as in ``torch.compile(..., options=...)``.

    Returns:
        what was compiled, a sentence for each part.

    Raises:
        TrainerError: the trainer is set up so that its head cannot run in chunks, or TRL has a
            version that mstpass does not know. The message says what to change.
        OptionError: an option has an unknown name or a bad value.
    """
    Options.parse(options)
    _refuse_two_compilers(trainer)
    compiled = functools.partial(torch.compile, backend=BACKEND, options=options)
    for name, compile_it in _TRL.items():
        if _is_a(trainer, name):
            return compile_it(trainer, compiled)
    if _reads_the_models_loss(trainer):
        return _model(trainer, compiled, options)
    return _compute_loss(trainer, compiled)


Compile = Callable[..., Any]


def _sft(trainer: Any, compiled: Compile) -> tuple[str, ...]:
    if trainer.args.loss_type != "chunked_nll":
        raise TrainerError(
            f"SFTConfig(loss_type={trainer.args.loss_type!r}) and mstpass.compile_trainer: TRL "
            "reads all logits for this loss and its metrics. Set loss_type='chunked_nll', which "
            "has the loss and the metrics of 'nll'."
        )
    base = trainer.accelerator.unwrap_model(trainer.model)
    model = base.get_base_model() if hasattr(base, "peft_config") else base
    own = model.forward
    exchange = {"_chunked_cross_entropy_loss": losses.chunked_cross_entropy_loss}
    forward = with_calls_exchanged(own.__func__, exchange)
    forward.__signature__ = inspect.signature(own.__func__)  # type: ignore[attr-defined]
    model.forward = forward.__get__(model)
    _compile_in_place(trainer.model, compiled)
    return (
        "the model, with its head and loss; TRL's loop of checkpointed chunks is one plain loss of "
        "all tokens, with the same metrics",
    )


def _logps(trainer: Any, compiled: Compile) -> tuple[str, ...]:
    """GRPO and RLOO: log-probabilities and entropies come from one method."""
    exchanges = {
        "selective_log_softmax": losses.selective_log_softmax,
        "entropy_from_logits": losses.entropy_from_logits,
    }
    method = compiled(with_calls_exchanged(getattr(type(trainer), LOGPS), exchanges))
    # a view of a dict's keys ends Dynamo's graph, before the model is called
    trainer.model_kwarg_keys = tuple(trainer.model_kwarg_keys)

    def instead(model: Any, *args: Any, **kwargs: Any) -> Any:
        return call_inside(model, lambda inner: method(trainer, inner, *args, **kwargs))

    setattr(trainer, LOGPS, instead)
    return (f"{LOGPS}: the model with its log-probabilities and entropies",)


def _preference(trainer: Any, compiled: Compile) -> tuple[str, ...]:
    """DPO and KTO: the trainer's own code reads the statistics of logits."""
    exchanges = {"selective_log_softmax": logits_stand_in.selective_log_softmax}
    if _is_a(trainer, "KTOTrainer"):
        exchanges["entropy_from_logits"] = logits_stand_in.entropy_from_logits
    own = trainer._compute_loss
    with_stand_in = with_calls_exchanged(type(trainer)._compute_loss, exchanges)
    score = compiled(logits_stand_in.score)

    def scored(model: Any, inputs: dict[str, Any]) -> logits_stand_in.StandInOutputs:
        statistics, aux_loss = call_inside(model, score, inputs)
        logits = logits_stand_in.StandIn(statistics, inputs["input_ids"][..., 1:])
        return logits_stand_in.StandInOutputs(logits, aux_loss)

    def instead(model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if return_outputs or not torch.is_grad_enabled():
            return own(model, inputs, return_outputs)
        return with_stand_in(trainer, _Called(model, scored), inputs, return_outputs)

    trainer._compute_loss = instead
    return ("the model with the log-probabilities, and the statistics of logits for the metrics",)


class _Called:
    """A model whose call is another function's; it has all else of the model."""

    def __init__(self, model: Any, function: Callable[..., Any]):
        self._model, self._function = model, function

    def __call__(self, **inputs: Any) -> Any:
        return self._function(self._model, inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _reward(trainer: Any, compiled: Compile) -> tuple[str, ...]:
    _compile_in_place(trainer.model, compiled)
    return ("the model; its head has one output for each sequence",)


_TRL: dict[str, Callable[[Any, Compile], tuple[str, ...]]] = {
    "SFTTrainer": _sft,
    "GRPOTrainer": _logps,
    "RLOOTrainer": _logps,
    "DPOTrainer": _preference,
    "KTOTrainer": _preference,
    "RewardTrainer": _reward,
}


def _model(trainer: Any, compiled: Compile, options: dict[str, Any]) -> tuple[str, ...]:
    compiled = functools.partial(compiled, options={"logits": "drop", **options})
    _compile_in_place(trainer.model, compiled)
    return ("the model; in training its logits are dropped, because only its loss is read",)


def _compute_loss(trainer: Any, compiled: Compile) -> tuple[str, ...]:
    own = trainer.compute_loss
    whole = compiled(own)

    def instead(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if return_outputs or not torch.is_grad_enabled():
            return own(model, inputs, return_outputs=return_outputs, **kwargs)
        return whole(model, inputs, **kwargs)

    trainer.compute_loss = instead
    return ("compute_loss: the model together with the loss that is computed from its logits",)


def _compile_in_place(model: Any, compiled: Compile) -> None:
    """Like ``model.compile(...)``, which leaves names, weights and class as they are."""
    model.compile(**compiled.keywords)  # type: ignore[attr-defined]


def _reads_the_models_loss(trainer: Any) -> bool:
    plain = next(c for c in type(trainer).__mro__ if c.__module__ == "transformers.trainer")
    own = type(trainer).compute_loss is not plain.compute_loss
    return not own and trainer.label_smoother is None and trainer.compute_loss_func is None


def _refuse_two_compilers(trainer: Any) -> None:
    arguments = trainer.args
    if arguments.torch_compile:
        raise TrainerError(
            f"torch_compile=True (backend {arguments.torch_compile_backend!r}) and "
            "mstpass.compile_trainer would both compile this trainer's model. Leave torch_compile "
            "and torch_compile_backend out; compile_trainer takes mst's options as arguments."
        )
    if getattr(arguments, "use_liger_kernel", False):
        raise TrainerError(
            "use_liger_kernel=True and mstpass.compile_trainer: both compute the head in chunks. "
            "Leave use_liger_kernel out."
        )


def _is_a(trainer: Any, name: str) -> bool:
    return any(
        c.__name__ == name and c.__module__.startswith("trl.") for c in type(trainer).__mro__
    )
