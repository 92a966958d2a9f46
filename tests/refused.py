"""Steps as users write them, whose head mst refuses, each for another reason.

Each function takes no arguments and returns what a user would compile, in most cases the loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

TOKENS, WIDTH, VOCABULARY = 1024, 64, 4096
_device = torch.device("meta")  # nothing here is ever computed


@library.custom_op("tests_refused::scale", mutates_args=())
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


scale.register_fake(lambda x, by: torch.empty_like(x))
scale.register_autograd(lambda ctx, grad: (grad, None))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, h_TD: Tensor) -> Tensor:
        return self.proj(h_TD)


with _device:
    model = Head()
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.long)


def fine(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    return F.cross_entropy(model(hidden), labels)


def logits_returned(hidden: Tensor = hidden, labels: Tensor = labels) -> tuple[Tensor, Tensor]:
    logits = model(hidden)
    return F.cross_entropy(logits, labels), logits


def loss_outside(hidden: Tensor = hidden) -> Tensor:
    return model(hidden)


def batch_statistics(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    logits = model(hidden)
    logits = logits - logits.median(0).values
    return F.cross_entropy(logits, labels)


def places_of_the_largest(hidden: Tensor = hidden) -> Tensor:
    logits = model(hidden)
    return F.cross_entropy(logits.t(), logits.argmax(0))


def product_over_tokens(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    logits = model(hidden)
    return F.cross_entropy(logits * logits.prod(0), labels)


def unknown_op(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    return F.cross_entropy(scale(model(hidden), 0.5), labels)


def dropout_on_logits(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    return F.cross_entropy(F.dropout(model(hidden), 0.1), labels)


def last_token(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    logits = model(hidden.view(4, -1, WIDTH))
    return F.cross_entropy(logits[:, -1], labels.view(4, -1)[:, -1])


def few_tokens(hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
    return F.cross_entropy(model(hidden[:200]), labels[:200])
