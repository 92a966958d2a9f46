"""The second oracle: the rewritten graphs compute in float64 what the joint graph computes.

Every type of a graph, and of the bodies of its loops, becomes float64, so that nothing rounds: an
error of 1e-7 is an error. The graphs run on the inputs and tangents of a real step. As a joint
graph is traced once and planned quickly, one case can be checked under several options.

Some programs magnify even the rounding of float64: a running sum of centred values ends at zero but
for rounding, and a norm behind it divides by that. How much a program does so shows in the joint
graph alone, whose results change where its inputs change in their last bit. An error that is no
larger than a few such changes is none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mstpass import pipeline
from mstpass.fuzz.case import VARIANTS, Case
from mstpass.fuzz.compiled import AsTraced, Recording, copied, draw_in_order
from mstpass.fuzz.plans import Failure, broken_promises
from mstpass.fuzz.program import rms
from mstpass.inductor_hooks import pipeline_kwargs
from mstpass.torch_internals.fake_tensors import as_while_tracing
from mstpass.torch_internals.graphs import graph_module

TOLERANCE = 1e-8  # times the root mean square of a value, or of all values if it is smaller
_ROUNDING = 10.0  # times the change of a value by the rounding of inputs
_NUDGES = 3  # how often the inputs are rounded at random
_HALF = (torch.float16, torch.bfloat16, torch.float32)
_READS_BITS = (torch.ops.aten.view.dtype,)
_REPEATS_DRAWS = "run_with_rng_state"  # torch's partitioner hands on the generator's state
_SEED = 5


def check_graphs(recording: Recording, setup: Case) -> tuple[int, list[Failure]]:
    """Run the rewritten graphs, and those of other options, which have their own promises.

    Returns:
        How many plans' graphs ran, and what is wrong: each graph that computes something else, and
        each broken promise.
    """
    joint, step, wrong = recording.joint, recording.step, list[Failure]()
    if joint is None or step is None or recording.modules is None or _is_other_in_float64(joint):
        return 0, wrong
    if any(str(n.target) not in step for n in joint.graph.find_nodes(op="placeholder")):
        return 0, wrong  # a token, which keeps effects in order and is no input of compiled graphs
    true = _True(in_float64(joint), step)
    plans: dict[str, Sequence[fx.GraphModule]] = {"these options": recording.modules}
    for name in setup.variants:
        options = dataclasses.replace(recording.options, **VARIANTS[name])
        with as_while_tracing(joint.graph):  # torch's partitioner asks for the fake tensors' mode
            result = pipeline.run(joint, options, **pipeline_kwargs(recording.given))
        assert result.modules is not None, "the modules are known"
        plans[name] = result.modules
        other = dataclasses.replace(setup, **VARIANTS[name])
        for failure in broken_promises(result.outcome, other):
            wrong.append(Failure(failure.kind, f"{name}: {failure.text}"))
    ran = {name: m for name, m in plans.items() if not any(map(_is_other_in_float64, m))}
    for name, (forward, backward) in ran.items():
        found = _run_split(in_float64(forward), in_float64(backward), step, len(true.results))
        if reason := true.first_difference(found):
            wrong.append(Failure("wrong graph", f"{name}: {reason}"))
    return len(ran), wrong


class _True:
    """What a joint graph computes in float64, and how far rounding changes that."""

    def __init__(self, joint: fx.GraphModule, step: Mapping[str, Any]):
        self.joint, self.step = joint, step
        self.results = _run(joint, step)
        self.scale = max(map(rms, self.results), default=0.0)

    @functools.cached_property
    def rounding(self) -> list[float]:
        """The most that each result changes where the inputs change in their last bit."""
        most = [0.0] * len(self.results)
        for seed in range(_NUDGES):
            results = _run(self.joint, _nudged(self.step, seed))
            changes = map(_error, results, self.results)
            most = [max(pair) for pair in zip(most, changes, strict=True)]
        return most

    def first_difference(self, found: Sequence[Any]) -> str:
        """How the first result that differs does so; empty if none does."""
        for position, (mine, true) in enumerate(zip(found, self.results, strict=True)):
            reason = self._difference(position, mine, true)
            if reason:
                return f"result {position} of the joint graph {reason}"
        return ""

    def _difference(self, position: int, mine: Any, true: Any) -> str:
        if not isinstance(mine, Tensor) or not isinstance(true, Tensor):
            return "" if type(mine) is type(true) else f"is {mine}, not {true}"
        if mine.shape != true.shape:
            return f"has the shape {tuple(mine.shape)}, not {tuple(true.shape)}"
        if not true.is_floating_point():
            return "" if torch.equal(mine, true) else "has other numbers"
        if not torch.equal(mine.isfinite(), true.isfinite()):
            return "is not finite elsewhere"
        error, size = _error(mine, true), rms(true)
        if error <= TOLERANCE * max(size, self.scale):
            return ""
        if error <= _ROUNDING * self.rounding[position]:
            return ""
        return f"has the error {error:.1e}, its values are about {size:.1e}"


def in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph in which every type is float64, and so in its subgraphs."""
    graph, held = copied(module.graph), {}
    for node in graph.nodes:
        node.args = _wide_types(node.args)
        node.kwargs = _wide_types(node.kwargs)
        if node.op == "get_attr":
            value = getattr(module, node.target)
            is_body = isinstance(value, fx.GraphModule)
            held[node.target] = in_float64(value) if is_body else _wide(value)
    draw_in_order(graph)
    return graph_module(held, graph)


def _wide_types(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return torch.float64 if argument in _HALF else argument
    if isinstance(argument, tuple | list):
        return type(argument)(map(_wide_types, argument))
    if isinstance(argument, dict):
        return {name: _wide_types(value) for name, value in argument.items()}
    return argument


def _wide(value: Any) -> Any:
    """A value in float64; a copy, as graphs may write to their inputs."""
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.dtype in _HALF else value.clone()


def _is_other_in_float64(module: fx.GraphModule) -> bool:
    """Whether a graph reads the bits of a value, or draws by a generator's state."""
    targets = [node.target for node in module.graph.nodes]
    return any(t in _READS_BITS or str(t) == _REPEATS_DRAWS for t in targets)


def _run(joint: fx.GraphModule, step: Mapping[str, Any]) -> list[Any]:
    names = [str(node.target) for node in joint.graph.find_nodes(op="placeholder")]
    return _results(joint, [step[name] for name in names])


def _run_split(
    forward: fx.GraphModule, backward: fx.GraphModule, step: Mapping[str, Any], results: int
) -> list[Any]:
    """The results of the joint graph: those of the forward, then the gradients."""
    names = [str(node.target) for node in forward.graph.find_nodes(op="placeholder")]
    values = _results(forward, [step[name] for name in names])
    returned: Any = forward.graph.output_node().args[0]
    saved = {str(node): value for node, value in zip(returned, values, strict=True)}
    inputs = backward.graph.find_nodes(op="placeholder")
    given = [saved.get(node.name, step.get(str(node.target))) for node in inputs]
    gradients = _results(backward, given, seed=_SEED + 1)
    return [*values[: results - len(gradients)], *gradients]


def _results(module: fx.GraphModule, inputs: Sequence[Any], seed: int = _SEED) -> list[Any]:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            results = AsTraced(module).run(*map(_wide, inputs))
    finally:
        torch.set_default_dtype(torch.float32)
    return list(results) if isinstance(results, tuple | list) else [results]


def _nudged(step: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The same inputs and tangents in float64, each a last bit larger or smaller at random."""
    drawn, bit = torch.Generator().manual_seed(seed), torch.finfo(torch.float64).eps

    def nudge(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        up = torch.randint(2, value.shape, generator=drawn, dtype=torch.float64)
        return value.double() * (1 + bit * (2 * up - 1))

    return {name: nudge(value) for name, value in step.items()}


def _error(mine: Any, true: Any) -> float:
    """The root mean square of a difference, where both values are finite."""
    return rms(mine - true) if isinstance(true, Tensor) and true.is_floating_point() else 0.0
