"""Trainers: what to compile in them so that the LM head and its loss are in one graph.

``torch.compile`` of a model is not enough where the loss is computed from the logits that the model
returned: the compiled graph ends with the logits, and they must exist in full. `compile_trainer`
compiles, by the class of the trainer:

====================================  =============================================================
TRL (SFT, DPO, KTO, GRPO, RLOO)       the model's forward with TRL's fused LM head, whose own loop
                                      over tiles becomes plain functions of all tokens
``label_smoothing_factor``,           ``Trainer.compute_loss``
``compute_loss_func``, a
``compute_loss`` of its own
all others                            the model
====================================  =============================================================

The code of the trainer stays what it is: functions that it calls are exchanged, for this trainer.
"""

from mstpass.trainers.exchange import TrainerError
from mstpass.trainers.what_to_compile import compile_trainer

__all__ = ["TrainerError", "compile_trainer"]
