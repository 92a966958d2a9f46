"""The plans of all architectures and losses as text files, to compare two versions of the passes.

A change that moves or renames code must leave every plan as it is:

    git worktree add ../before HEAD~1
    (cd ../before && PYTHONPATH=. python -m tests.plan_texts /tmp/plans-before)
    python -m tests.plan_texts /tmp/plans-after
    diff -r /tmp/plans-before /tmp/plans-after

A file holds one plan: regions, rejections, saved values, simulated peaks, and the joint, forward
and backward graphs with the bodies of their loops. The wording of reasons is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mstpass import pipeline
from mstpass.bench.huggingface import TINY, Architecture, architectures
from mstpass.graph.graph_text import graph_text
from mstpass.options import Options
from mstpass.torch_internals.aot_autograd import merge_equal_nodes
from tests.checks import joint_graph
from tests.losses import FUSED, OUTSIDE, RECOMPUTED, REFUSED, VOCAB, Loss, LossModel

ARCHITECTURES = architectures(TINY)
OPTIONS: dict[str, dict[str, Any]] = {
    "free": {"chunk_tokens": 64},
    "least": {"memory_budget": 0.0},
    "tolerant": {"memory_budget": 0.1, "reconstruct": "tolerant"},
}
DROPOUT = ("gpt2", "bert", "t5", "phi", "vit")

Joint = tuple[fx.GraphModule, int]


def cases() -> Iterator[tuple[str, Callable[[], Joint]]]:
    """Names, and how to trace the joint graph of each."""
    for name, arch in ARCHITECTURES.items():
        yield name, lambda arch=arch: _architecture(arch, 0.0)
    for name in DROPOUT:
        yield f"{name}-dropout", lambda arch=ARCHITECTURES[name]: _architecture(arch, 0.1)
    yield "llama-symbolic", lambda: _architecture(ARCHITECTURES["llama"], 0.0, dynamic=True)
    for name, loss in {**FUSED, **RECOMPUTED, **OUTSIDE, **REFUSED}.items():
        yield f"loss-{name}", lambda loss=loss: _loss(loss)


def _architecture(arch: Architecture, dropout: float, dynamic: bool | None = None) -> Joint:
    loss, batch = arch.loss_of(arch.build(dropout)), arch.batch()
    names = list(batch)
    return joint_graph(
        lambda *values: loss(**dict(zip(names, values, strict=True))),
        *batch.values(),
        dynamic=dynamic,
    )


def _loss(loss: Loss) -> Joint:
    torch.manual_seed(0)
    model = LossModel()
    return joint_graph(lambda ids: loss(model, ids), torch.randint(0, VOCAB, (4, 101)))


def plan_text(joint: Joint, given: dict[str, Any]) -> str:
    """What the pipeline makes of one joint graph under some options."""
    module, outputs = joint
    options = Options.parse(given, environ={})
    result = pipeline.run(module, options, num_fwd_outputs=outputs)
    outcome = result.outcome
    lines = ["regions:", *(_plain(region) for region in outcome.regions)]
    lines += ["rejections:", *(f"{r.stage} {r.node} {r.source}" for r in outcome.rejections)]
    lines += [
        f"save plan: {_plain(outcome.save_plan)}",
        f"peak: {outcome.peak_bytes} of {outcome.baseline_peak_bytes}",
        f"extra time: {outcome.extra_time}",
    ]
    graphs = {"joint": result.joint}
    if result.modules is not None:
        graphs |= {"forward": result.modules[0], "backward": result.modules[1]}
    for name, graph in graphs.items():
        lines += [f"{name}:", graph_text(graph) if graph is not None else "none"]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    """Field values in order, without the names of classes and fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return f"({', '.join(map(_plain, fields))})"
    if isinstance(value, dict):
        return _plain(tuple(value.items()))
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_plain, value)))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the texts")
    parser.add_argument("--only", default="", help="cases whose names match this pattern")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name, trace in cases():
        if not re.search(args.only, name):
            continue
        module, outputs = trace()
        merge_equal_nodes(module)
        for label, given in OPTIONS.items():
            (args.out / f"{name}-{label}.txt").write_text(plan_text((module, outputs), given))
        print(name, flush=True)


if __name__ == "__main__":
    main()
