"""Trainers whose loss is computed outside of the model: what to compile in them.

``torch.compile`` of a model is not enough where the loss is computed from the logits that the model
returned: the compiled graph ends with the logits, and they must exist in full. `compile_trainer`
compiles more, by the class of the trainer:

==============================  ===================================================================
TRL's GRPO and RLOO             the method that computes log-probabilities and entropies
TRL's DPO and KTO               the model together with the statistics of its logits that they read
TRL's SFT                       the model; its loop of checkpointed chunks becomes one plain loss
label smoothing, own losses     ``Trainer.compute_loss``
all others                      the model
==============================  ===================================================================

The code of the trainer stays what it is: functions that it calls are exchanged, for this trainer.
"""

from mstpass.trainers.compile_trainer import TrainerError, compile_trainer

__all__ = ["TrainerError", "compile_trainer"]
