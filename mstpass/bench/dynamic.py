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

from mstpass.bench import lengths
from mstpass.bench.comparison import INDUCTOR, MST, own_code
from mstpass.bench.harness import Arguments, Benchmark, Progress
from mstpass.bench.models import LlamaSize, Step, llama
from mstpass.bench.results import Ratio, Result, Table, Target, mib_cell, quotient, ratio_cell
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
  mstpass bench dynamic --steps 1000      a longer walk: hours, at 5 to 15 s a step
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
        lengths: the lengths that it runs.
        graphs: number of compilations.
        seconds: for each length, one time per round.
    """

    compile: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
    lengths: Sequence[int]
    graphs: int = 0
    seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0


def _runners(lengths: Sequence[int]) -> dict[str, _Runner]:
    ours: dict[str, Any] = {"backend": "mst", "options": {"strict": True}}
    static = lengths[:_STATIC]
    return {
        INDUCTOR: _Runner(lambda fn: torch.compile(fn), lengths),
        MST: _Runner(lambda fn: torch.compile(fn, **ours), lengths),
        f"{INDUCTOR}, static": _Runner(lambda fn: torch.compile(fn, dynamic=False), static),
        f"{MST}, static": _Runner(lambda fn: torch.compile(fn, dynamic=False, **ours), static),
    }


def run(arguments: Arguments) -> Result:
    size, lengths = (_QUICK_SIZE, _QUICK_LENGTHS) if arguments.quick else (_SIZE, _LENGTHS)
    model, ids_BS, target_BS = llama(size, arguments.device)
    runners = _runners(lengths)

    def loss(ids: Tensor, target: Tensor) -> Tensor:
        value: Tensor = model(ids, target)
        return value

    def step_at(length: int, fn: Callable[..., Tensor]) -> Step:
        ids, target = ids_BS[:, :length].contiguous(), target_BS[:, :length].contiguous()
        return Step(lambda: fn(ids, target), list(model.parameters()))

    steps: dict[str, dict[int, Step]] = {}
    timed_at = lengths[:_STATIC]
    total = sum(len(runner.lengths) for runner in runners.values())
    total += arguments.repeats * len(runners) * len(timed_at)
    torch.compiler.reset()
    with fresh_cache(), Progress("dynamic", total) as advance:
        for name, runner in runners.items():
            fn = runner.compile(own_code(loss))
            steps[name] = {n: step_at(n, fn) for n in runner.lengths}
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
        for name, runner in runners.items():
            runner.peak_bytes = peak_bytes(steps[name][max(timed_at)], arguments.device)
    return _result(size, lengths, runners)


def _compilations(steps: dict[int, Step], advance: Callable[[], None]) -> int:
    before = counters["stats"]["unique_graphs"]
    for step in steps.values():
        step()
        advance()
    return int(counters["stats"]["unique_graphs"] - before)


def _result(size: LlamaSize, lengths: Sequence[int], runners: dict[str, _Runner]) -> Result:
    result = Result(
        "dynamic",
        f"{len(lengths)} sequence lengths in turn: d={size.width}, L={size.layers}, "
        f"l={size.mlp_width}, V={size.vocabulary}, fp32",
    )
    relative = {
        name: _ratios(runner, runners[f"{name.removesuffix(', static')}, static"])
        for name, runner in runners.items()
    }
    columns: dict[str, Callable[[tuple[str, _Runner]], str]] = {
        "": lambda item: item[0],
        "compilations": lambda item: f"{item[1].graphs} for {len(item[1].lengths)} lengths",
        "time / its static graphs": lambda item: ratio_cell(relative[item[0]]),
        "peak MiB": lambda item: mib_cell(item[1].peak_bytes),
    }
    result.tables.append(Table.of("steps", runners.items(), columns))
    graphs = quotient(runners[MST].graphs, runners[INDUCTOR].graphs)
    result.targets += [
        Target("compilations / Inductor's", graphs, 1.0),
        Target("time / static graphs", relative[MST][0], TIME_LIMIT),
    ]
    result.notes.append(
        f"Lengths {', '.join(map(str, lengths))}. Time: median ratio over rounds (least-greatest) "
        f"of the sum over the first {_STATIC} lengths; peak at the longest of them."
    )
    result.records["runners"] = {
        name: {"graphs": r.graphs, "seconds": r.seconds, "peak_bytes": r.peak_bytes}
        for name, r in runners.items()
    }
    return result


def _ratios(runner: _Runner, static: _Runner) -> Ratio:
    ours, theirs = (
        [sum(times) for times in zip(*each.seconds.values(), strict=True)]
        for each in (runner, static)
    )
    rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Timing(tuple(rounds)).median_s, min(rounds), max(rounds)


main = Benchmark("dynamic", (run, lengths.run), _DESCRIPTION, EXAMPLES, options=("steps",))
