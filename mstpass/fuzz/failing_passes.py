"""The fourth oracle: a pass that fails costs what it makes, and nothing else.

Its failure is injected. The report names the pass. If the pass would have changed nothing, the step
has the regions that it has with it; in any case its graphs compute what the joint graph computes
(graphs.py).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mstpass import normalize, pipeline
from mstpass.fuzz.compiled import Recording
from mstpass.fuzz.plans import Failure
from mstpass.graph.joint import JointGraph, Modules
from mstpass.inductor_hooks import pipeline_kwargs
from mstpass.partition.reconstruct import RECONSTRUCT
from mstpass.passes import runner
from mstpass.passes.runner import Pass, PassRunner
from mstpass.pipeline_stages import APPLY_PLANS
from mstpass.torch_internals.fake_tensors import as_while_tracing

_LISTS = (normalize.READ, normalize.SIZES, normalize.TOKENS, normalize.FOR_SECTIONS)
_MORE = (normalize.HEADS, normalize.ROWS, (normalize.MASKS, RECONSTRUCT, APPLY_PLANS))
PASSES = tuple(sorted({step.name for steps in (*_LISTS, *_MORE) for step in steps}))


@dataclasses.dataclass
class Injected:
    """What is known of the pass: how often it ran, and whether it would have changed the graph."""

    runs: int = 0
    changes: bool = False


@contextmanager
def failing(name: str) -> Iterator[Injected]:
    """Have the pass fail in here, after it has done its work."""
    found, before, least = Injected(), PassRunner.run_alone, runner.LEAST

    def instead(self: PassRunner, step: Pass, *args: Any, **kwargs: Any) -> Any:
        def fails(joint: JointGraph, *more: Any, **options: Any) -> Any:
            new, _ = step.run(joint, *more, **options)
            found.runs += 1
            found.changes |= new is not joint
            raise ZeroDivisionError("injected")

        broken = dataclasses.replace(step, run=fails) if step.name == name else step
        return before(self, broken, *args, **kwargs)

    PassRunner.run_alone, runner.LEAST = instead, runner.OFF  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PassRunner.run_alone, runner.LEAST = before, least  # type: ignore[method-assign]


def chosen(recording: Recording, count: int = 2) -> list[str]:
    """Some passes: others for each graph, and the same each time."""
    assert recording.joint is not None, "a graph was recorded"
    return random.Random(len(recording.joint.graph.nodes)).sample(PASSES, count)


def without(recording: Recording, name: str) -> tuple[Modules | None, list[Failure]]:
    """The graphs of the plan without a pass, and the promises that are broken.

    A pass that a graph is wrong without leaves no plan.
    """
    joint, options = recording.joint, dataclasses.replace(recording.options, strict=False)
    assert joint is not None, "a graph was recorded"
    given = pipeline_kwargs(recording.given)
    with as_while_tracing(joint.graph):
        before = pipeline.run(joint, options, **given).outcome
        try:
            with failing(name) as injected:
                result = pipeline.run(joint, options, **given)
        except runner.PassError:
            return None, []
    wrong = []
    told = any(f"the pass {name} is refused" in r.reason for r in result.outcome.rejections)
    if injected.runs and not told:
        wrong.append(Failure("not told", f"the report does not name {name}, which failed"))
    regions = [[(r.kind, r.source) for r in found.regions] for found in (before, result.outcome)]
    if not injected.changes and regions[0] != regions[1]:
        text = f"without {name}, which changes nothing: {regions[1]} in place of {regions[0]}"
        wrong.append(Failure("rest not planned", text))
    return result.modules, wrong
