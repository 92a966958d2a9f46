"""What each process of `mstpass bench training` runs: models trained from real text, with AdamW.

A *job* is a model in one precision under one budget, and the steps that the process takes. A job
that does not begin with the first step goes on from the checkpoint that another process left; one
that ends before the last step leaves a checkpoint. All run in torch's deterministic mode.

    python -m mstpass.bench.training_run FOLDER

FOLDER has ``jobs.json`` and the text as token ids, ``stream.pt``; ``runs.json`` is written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mstpass
from mstpass import stdlib_text
from mstpass.bench.huggingface_models import Case, Size, llama, loss_of, olmo2
from mstpass.measure import peak_bytes
from mstpass.torch_internals.settings import recompilation_fails

LLAMA, OLMO2 = "Llama", "OLMo-2"
MODELS: dict[str, Callable[[Size, float], nn.Module]] = {LLAMA: llama, OLMO2: olmo2}
STREAM, JOBS, RUNS = "stream.pt", "jobs.json", "runs.json"
_LEARNING_RATE, _WARMUP_STEPS = 1e-3, 10


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and the steps that a process trains it.

    Attributes:
        budget: ``memory_budget`` of mst; None for eager.
        seed: of the weights.
        first, last: the steps from ``first`` to before ``last``, of ``steps`` in all.
        checkpoint: the file from which a job with ``first`` > 0 goes on, and which a job with
            ``last`` < ``steps`` writes.
    """

    model: str
    autocast: bool
    budget: str | float | None
    seed: int
    size: Size
    steps: int
    first: int
    last: int
    checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a job found.

    Attributes:
        weights: a hash of all weights after the last step.
        peak_bytes: of a forward and backward after the last step.
        plan: mst's loops, as text.
    """

    losses: list[float]
    weights: str
    peak_bytes: int
    plan: str


def train(job: Job, stream_T: Tensor, device: torch.device) -> Run:
    """Take the job's steps, and measure one more."""
    torch.manual_seed(job.seed)
    case = Case(job.model, MODELS[job.model], job.autocast)
    model = case.build(job.size, 0.0).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS)
    )
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if job.first:
        for name, state in torch.load(job.checkpoint, weights_only=True).items():
            parts[name].load_state_dict(state)
    size, made = job.size, len(mstpass.reports())
    batches = stdlib_text.batches(stream_T, job.steps, size.batch, size.length)
    loss_fn = loss_of(case, model)
    if job.budget is not None:
        options: dict[str, Any] = {"memory_budget": job.budget, "strict": True}
        loss_fn = torch.compile(loss_fn, backend="mst", fullgraph=True, options=options)
    losses = []
    for ids_BS in batches[job.first : job.last]:
        loss = loss_fn(ids_BS.to(device))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if job.last < job.steps:
        torch.save({name: part.state_dict() for name, part in parts.items()}, job.checkpoint)
    regions = (r for report in mstpass.reports()[made:] for r in report.regions)
    plan = ", ".join(f"{r.kind} {r.mode} in {r.num_chunks}" for r in regions)
    with recompilation_fails():
        peak = peak_bytes(lambda: loss_fn(batches[-1].to(device)).backward(), device)
    return Run(losses, _hash(model), peak, plan)


def _hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def run_jobs(jobs: list[Job], stream_T: Tensor, device: torch.device) -> list[Run]:
    """Each job afresh, in torch's deterministic mode."""
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for job in jobs:
            torch.compiler.reset()
            found.append(train(job, stream_T, device))
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def main(folder: str) -> None:
    given: Any = json.loads(Path(folder, JOBS).read_text("utf-8"))
    jobs = [Job(**{**job, "size": Size(**job["size"])}) for job in given["jobs"]]
    stream_T = torch.load(Path(folder, STREAM), weights_only=True)
    found = run_jobs(jobs, stream_T, torch.device(given["device"]))
    text = json.dumps([dataclasses.asdict(run) for run in found])
    Path(folder, RUNS).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
