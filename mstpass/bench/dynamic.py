"""`mstpass bench dynamic`: one Llama-like step at many sequence lengths, one after the other.

torch.compile compiles the first length as a constant, and makes the length symbolic when it
changes. A backend that adds guards on the symbolic length would compile for every new length. Times
are compared with those of static graphs, each compiled for one length.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mstpass.bench import tables
from mstpass.bench.arguments import Arguments
from mstpass.bench.command import Command, Progress
from mstpass.bench.comparison import INDUCTOR, MST, own_code
from mstpass.bench.models import LlamaSize, Step, llama
from mstpass.bench.tables import Result, Table, Target
from mstpass.measure import Timing, peak_bytes, timed
from mstpass.torch_internals.caches import counters, fresh_cache
from mstpass.torch_internals.settings import recompilation_fails

TIME_LIMIT = 1.05
_DESCRIPTION = """\
Run a Llama-like step at many sequence lengths in turn: count the
compilations, and compare times with those of a static graph for each
length."""
EXAMPLES = """  mstpass bench dynamic
  mstpass bench dynamic --repeats 9 --markdown docs/results/dynamic.md
"""
_SIZE = LlamaSize(layers=2)
_LENGTHS = (1500, 2048, 1111, 1999, 1024, 1733, 1280, 2011, 1361, 1920)
_QUICK_SIZE = LlamaSize(width=64, layers=1, mlp_width=256, vocabulary=2048)
_QUICK_LENGTHS = (640, 1024, 701, 997)
_STATIC = 3  # the first lengths, for each of which a static graph is compiled too


@dataclasses.dataclass
class _Runner:
    """One way to compile the step.

    Attributes:
        graphs: number of compilations.
        seconds: for each length, one time per round.
    """

    compile: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
    graphs: int = 0
    seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)


def run(arguments: Arguments) -> Result:
    size, lengths = (_QUICK_SIZE, _QUICK_LENGTHS) if arguments.quick else (_SIZE, _LENGTHS)
    model, ids_BS, target_BS = llama(size, arguments.device)
    runners = {
        INDUCTOR: _Runner(lambda fn: torch.compile(fn)),
        MST: _Runner(lambda fn: _mst(fn)),
        f"{INDUCTOR}, static": _Runner(lambda fn: torch.compile(fn, dynamic=False)),
        f"{MST}, static": _Runner(lambda fn: _mst(fn, dynamic=False)),
    }

    def loss(ids: Tensor, target: Tensor) -> Tensor:
        value: Tensor = model(ids, target)
        return value

    def step_at(length: int, fn: Callable[..., Tensor]) -> Step:
        ids, target = ids_BS[:, :length].contiguous(), target_BS[:, :length].contiguous()
        return Step(lambda: fn(ids, target), list(model.parameters()))

    steps: dict[str, dict[int, Step]] = {}
    timed_at = lengths[:_STATIC]
    total = sum(len(_lengths_of(name, lengths)) for name in runners)
    total += arguments.repeats * len(runners) * len(timed_at)
    peaks: dict[str, int] = {}
    torch.compiler.reset()
    with fresh_cache(), Progress("dynamic", total) as advance:
        for name, runner in runners.items():
            fn = runner.compile(own_code(loss))
            steps[name] = {n: step_at(n, fn) for n in _lengths_of(name, lengths)}
            runner.graphs = _compilations(steps[name], functools.partial(advance, name))
        for _ in range(arguments.repeats):
            gc.collect()
            for length in timed_at:
                for name, runner in runners.items():
                    one = {name: steps[name][length]}
                    with recompilation_fails():
                        timing = timed(one, 1, warmup=0, device=arguments.device)[name]
                    runner.seconds.setdefault(length, []).extend(timing.seconds)
                    advance(name)
        for name in runners:
            peaks[name] = peak_bytes(steps[name][max(timed_at)], arguments.device)
    return _result(size, lengths, runners, peaks)


def _mst(fn: Callable[..., Tensor], dynamic: bool | None = None) -> Callable[..., Tensor]:
    options: dict[str, Any] = {"strict": True}
    return torch.compile(fn, backend="mst", dynamic=dynamic, options=options)


def _lengths_of(name: str, lengths: Sequence[int]) -> Sequence[int]:
    return lengths[:_STATIC] if name.endswith("static") else lengths


def _compilations(steps: dict[int, Step], advance: Callable[[], None]) -> int:
    before = counters["stats"]["unique_graphs"]
    for step in steps.values():
        step()
        advance()
    return int(counters["stats"]["unique_graphs"] - before)


def _result(
    size: LlamaSize, lengths: Sequence[int], runners: dict[str, _Runner], peaks: dict[str, int]
) -> Result:
    result = Result(
        "dynamic",
        f"{len(lengths)} sequence lengths in turn: d={size.width}, L={size.layers}, "
        f"l={size.mlp_width}, V={size.vocabulary}, fp32",
    )
    lines = []
    for name, runner in runners.items():
        static = runner if name.endswith("static") else runners[f"{name}, static"]
        lines.append(
            (
                name,
                f"{runner.graphs} for {len(_lengths_of(name, lengths))} lengths",
                tables.ratio_cell(_ratios(runner, static)),
                tables.mib_cell(peaks[name]),
            )
        )
    columns = ("", "compilations", "time / its static graphs", "peak MiB")
    result.tables.append(Table("steps", columns, tuple(lines)))
    ours, base = runners[MST], runners[INDUCTOR]
    ratio = _ratios(ours, runners[f"{MST}, static"])
    result.targets += [
        Target("compilations / Inductor's", tables.quotient(ours.graphs, base.graphs), 1.0),
        Target("time / static graphs", ratio[0], TIME_LIMIT),
    ]
    result.notes.append(
        f"Lengths {', '.join(map(str, lengths))}. Time: median ratio over rounds (least-greatest) "
        f"of the sum over the first {_STATIC} lengths; peak at the longest of them."
    )
    result.records["runners"] = {
        name: {"graphs": r.graphs, "seconds": r.seconds, "peak_bytes": peaks[name]}
        for name, r in runners.items()
    }
    return result


def _ratios(runner: _Runner, static: _Runner) -> tuple[float, float, float]:
    rounds = [
        sum(ours) / sum(theirs)
        for ours, theirs in zip(
            zip(*runner.seconds.values(), strict=True),
            zip(*static.seconds.values(), strict=True),
            strict=True,
        )
    ]
    return Timing(tuple(rounds)).median_s, min(rounds), max(rounds)


main = Command("dynamic", (run,), _DESCRIPTION, EXAMPLES)
