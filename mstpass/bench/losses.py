"""Measure an LM head under each of several losses: step time against Inductor
without chunks, and peak against the floor, which is the memory that no loop
can avoid.

The *floor* is the memory that no loop can avoid: the weight gradient, the input gradient, and one
chunk of logits, as long as mst's chunks are.

examples:
  mstpass bench losses
  mstpass bench losses --repeats 3 --markdown docs/results/losses.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass
from mstpass.bench import comparison, results
from mstpass.bench.comparison import INDUCTOR, MST, inductor, mst
from mstpass.bench.harness import Arguments, Benchmark, advancing
from mstpass.bench.models import Head
from mstpass.bench.results import Result, Row, Table, Target

PEAK_LIMIT, FUSED_TIME_LIMIT, RECOMPUTE_TIME_LIMIT = 1.15, 1.05, 1.40
SEQUENCES = 4

Loss = Callable[[Tensor, Tensor], Tensor]  # logits [B, S, V], next tokens [B, S]


def run(arguments: Arguments) -> Result:
    tokens, width, vocabulary = sizes(arguments.quick)
    head = Head.build(tokens, width, vocabulary, arguments.device)
    title = f"An LM head under each loss: N={tokens}, d={width}, V={vocabulary}, fp32"
    result = Result("losses", title)
    lines = []
    with advancing("losses", len(LOSSES) * 2 * (2 + arguments.repeats)) as advance:
        for name, loss in LOSSES.items():
            work = head.work(on_head(head, loss))
            rows = comparison.compare([inductor(), mst()], work, arguments, advance)
            lines.append(_line(name, head, rows, result))
            result.records[name] = results.records(rows)
    columns = ("loss", "mode", "time / Inductor", "estimated", "Inductor MiB", "mst MiB")
    result.tables.append(Table("losses", (*columns, "peak / floor"), tuple(lines)))
    result.notes.append(
        "Time: median ratio over interleaved rounds (least-greatest). Floor: weight gradient + "
        "input gradient + one of mst's chunks of logits."
    )
    return result


def sizes(quick: bool) -> tuple[int, int, int]:
    """Tokens, width and vocabulary of the head."""
    return (512, 64, 4096) if quick else (2048, 256, 32_000)


def _line(name: str, head: Head, rows: Mapping[str, Row], result: Result) -> tuple[str, ...]:
    ours, base = rows[MST], rows[INDUCTOR]
    regions = mstpass.reports()[-1].regions
    mode = regions[0].mode if regions else "refused"
    floor = head.floor_bytes(regions[0].num_chunks) if regions else None
    relative = results.quotient(ours.peak_bytes, floor)
    limit = FUSED_TIME_LIMIT if mode == "fused" else RECOMPUTE_TIME_LIMIT
    result.targets += [
        Target(f"{name}: peak / floor", relative, PEAK_LIMIT),
        Target(f"{name}: time / Inductor", results.time_ratio(ours, base), limit),
    ]
    return (
        name,
        mode,
        ours.error or results.ratio_cell(results.ratios(ours, base)),
        results.estimate_cell(ours, base),
        results.mib_cell(base.peak_bytes),
        results.mib_cell(ours.peak_bytes),
        results.times_cell(relative),
    )


def on_head(head: Head, loss: Loss) -> Callable[[], Tensor]:
    """A function that computes the loss of a head's logits, with tokens in sequences."""
    target = head.target.view(SEQUENCES, -1)

    def value() -> Tensor:
        logits = F.linear(head.hidden.view(SEQUENCES, -1, head.hidden.shape[-1]), head.weight)
        return loss(logits, target)

    return value


def _cross_entropy(logits: Tensor, target: Tensor, **kwargs: object) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **kwargs)  # type: ignore[arg-type]


def _logps(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _shifted(logits: Tensor, target: Tensor) -> Tensor:
    return _cross_entropy(logits[:, :-1], target[:, 1:])


def _z_loss(logits: Tensor, target: Tensor) -> Tensor:
    return _cross_entropy(logits, target) + 1e-4 * torch.logsumexp(logits, -1).square().mean()


def _policy_gradient(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of GRPO: clipped ratios, averaged over each sequence, then over sequences."""
    logp = _logps(logits / 0.7, target)
    advantage = torch.cos(target[:, :1].float())
    ratio = torch.exp(logp - logp.detach() - 0.3 * torch.sin(target.float()))
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    mask = (target % 5 != 0).float()
    return -((gain * mask).sum(1) / mask.sum(1)).mean()


def _preference(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of DPO: a nonlinear function of sums over sequences.

    The gradient of a token depends on its whole sequence, not on one scalar.
    """
    total = _logps(logits, target).mean(1)
    return -F.logsigmoid(total[:2] - total[2:]).mean()


def _entropy_bonus(logits: Tensor, target: Tensor) -> Tensor:
    logp = torch.log_softmax(logits, -1)
    return _cross_entropy(logits, target) + 0.01 * (logp.exp() * logp).sum(-1).mean()


LOSSES: dict[str, Loss] = {
    "cross-entropy": _cross_entropy,
    "logits[:, :-1]": _shifted,
    "label smoothing": lambda x, y: _cross_entropy(x, y, label_smoothing=0.1),
    "z-loss": _z_loss,
    "soft cap": lambda x, y: _cross_entropy(30 * torch.tanh(x / 30), y),
    "entropy bonus": _entropy_bonus,
    "log-probabilities": lambda x, y: -_logps(x, y).mean(),
    "policy gradient": _policy_gradient,
    "preference": _preference,
}


main = Benchmark("losses", (run,), __doc__)
