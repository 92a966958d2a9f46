"""A compiled step's memory, by length: the joint graph of one length, its problem scaled to others.

The joint graph is traced at one number of tokens N that no other size of the model has as a
factor. So each value's bytes tell whether it has N rows, and the problem of any other length
follows: such values, and the time of the ops and loops, grow with N (attention's time with N^2), a
loop's chunk stays. That holds for lengths of many chunks; what is reported is traced at its length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from mstpass import pipeline
from mstpass.graph.joint import value_of
from mstpass.memory.simulate_plan import StepSimulation
from mstpass.options import Options
from mstpass.planner.accounting import Parts, Training
from mstpass.planner.allocator_replay import Event
from mstpass.planner.compiled_allocations import step_events
from mstpass.planner.models import build, workspace_bytes
from mstpass.problem.apply_modes import with_modes
from mstpass.problem.op import CALL, POINTWISE, VIEW
from mstpass.problem.problem import CutProblem, Plan, Value, is_loop
from mstpass.torch_internals.fake_tensors import FakeTensor
from mstpass.torch_internals.pytrees import tree_map
from mstpass.tracing.joint_graphs import trace_joint

_DEVICE = torch.device("cuda", 0)  # whose costs decide chunk lengths; nothing runs there
_GRAIN = 16
_PADDED = (0, 1, -1)  # labels are padded and shifted by one


@dataclasses.dataclass(frozen=True)
class Traced:
    """The problems of one joint graph under several budgets.

    Attributes:
        tokens: N of the batch that was traced.
        problems: by ``memory_budget``.
        logits: values of tokens x vocabulary.
        workspaces: bytes that an attention's backward needs on CUDA besides its results. Solvers do
            not see them, as they do not when a step is compiled.
    """

    batch: int
    length: int
    problems: Mapping[object, CutProblem]
    logits: frozenset[str]
    workspaces: Mapping[str, int]

    def at(self, length: int, memory_budget: object) -> CutProblem:
        """The problem of another length."""
        problem = self.problems[memory_budget]
        return problem if length == self.length else _scaled(problem, self, length / self.length)


def trace(
    config: Any, training: Training, length: int, budgets: tuple[object, ...], exact: bool = False
) -> Traced:
    """Trace a training step; with ``exact`` at this very length, else at one close to it."""
    with torch.device("meta"):
        model = build(config, training)
    tied = config.get_text_config().tie_word_embeddings
    model = model.to_empty(device="cpu")  # reserved, never written
    if tied:
        model.tie_weights()  # type: ignore[operator]
    length = length if exact else distinct_length(model, length)
    ids_BS = torch.zeros(training.batch, length, dtype=torch.long)

    def loss_of(ids_BS: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=training.dtype == "autocast"):
            return model(input_ids=ids_BS, labels=ids_BS).loss

    def take(module: fx.GraphModule, num_fwd_outputs: int) -> Traced:
        _on_device(module)
        workspaces, logits = _workspaces(module), _logits(module, config.vocab_size)
        problems = {}
        for budget in budgets:
            options = Options.parse({"memory_budget": budget, "solver": "min_cut"})
            result = pipeline.run(
                module, options, num_fwd_outputs=num_fwd_outputs, stop_after="plan"
            )
            assert result.problem is not None
            problems[budget] = _with_divided_gradients(result.problem, training)
        return Traced(training.batch, length, problems, logits, workspaces)

    return trace_joint(loss_of, (ids_BS,), take)


def distinct_length(model: nn.Module, length: int) -> int:
    """A length of at least ``length`` with a prime factor that no parameter's size has."""
    prime = max(2, -(-length // _GRAIN))
    sizes = {n for p in model.parameters() for n in p.shape}
    while any(prime % d == 0 for d in range(2, math.isqrt(prime) + 1)) or any(
        n % prime == 0 for n in sizes
    ):
        prime += 1
    return prime * _GRAIN


class CompiledStep:
    """A plan's step at a length, simulated."""

    def __init__(self, traced: Traced, problem: CutProblem, plan: Plan, length: int):
        self.traced, self.problem, self.plan = traced, problem, plan
        closed = _with_workspaces(with_modes(problem, plan.modes), traced, length)
        self._simulation = StepSimulation(closed, plan.saved, plan.nested)

    @functools.cached_property
    def us(self) -> float:
        """Its time by the cost model."""
        return self._simulation.us

    @functools.cached_property
    def parts(self) -> Parts:
        """What it holds at its peak."""
        timeline, gradients = self._simulation.memory.peak, _gradients(self.problem)
        bytes_of = dict.fromkeys(("gradients", "logits", "saved", "loops", "other"), 0)
        for name, size in timeline.alive:
            name = name.partition(":")[0]
            if name in gradients:
                bytes_of["gradients"] += size
            elif name in self.traced.logits:
                bytes_of["logits"] += size
            else:
                bytes_of["saved" if name in self.plan.saved else "other"] += size
        inner = timeline.peak.bytes - sum(moment.bytes for moment in timeline.alive)
        in_loop = is_loop(timeline.peak.node)
        bytes_of["loops" if in_loop else "other"] += inner
        return Parts(**bytes_of)

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """The order in which it allocates and frees."""
        return step_events(self._simulation.memory)


# ---- from graph to problem ---------------------------------------------------------------------
def _on_device(module: fx.GraphModule) -> None:
    """As if traced on a GPU: its costs of chunks and time hold."""
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(_moved, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _DEVICE}


def _moved(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=_DEVICE
        ).requires_grad_(value.requires_grad)


def _workspaces(module: fx.GraphModule) -> dict[str, int]:
    found = {}
    for node in module.graph.nodes:
        if "flash_attention_backward" in str(node.target):
            query, key = (value_of(operand) for operand in node.args[1:3])
            assert query is not None and key is not None
            found[node.name] = workspace_bytes(query, key)
    return found


def _logits(module: fx.GraphModule, vocabulary: int) -> frozenset[str]:
    inputs = {tuple(n.meta["val"].shape) for n in module.graph.find_nodes(op="placeholder")}
    inputs |= {shape[::-1] for shape in inputs}
    return frozenset(
        node.name
        for node in module.graph.nodes
        if (value := value_of(node)) is not None
        and value.dim() > 1
        and value.shape[-1] == vocabulary
        and tuple(value.shape) not in inputs
    )


def _with_workspaces(problem: CutProblem, traced: Traced, length: int) -> CutProblem:
    size = {name: n * length // traced.length for name, n in traced.workspaces.items()}
    backward = tuple(
        dataclasses.replace(value, inner_bytes=size[value.name]) if value.name in size else value
        for value in problem.backward
    )
    return dataclasses.replace(problem, backward=backward)


def _with_divided_gradients(problem: CutProblem, training: Training) -> CutProblem:
    """Gradients of which each rank keeps its share, as soon as they are made."""
    if not training.gradients_divided or training.ranks == 1:
        return problem
    gradients = {_base(problem, name) for name in problem.gradients}
    backward = tuple(
        dataclasses.replace(value, bytes=-(-value.bytes // training.ranks))
        if value.name in gradients
        else value
        for value in problem.backward
    )
    return dataclasses.replace(problem, backward=backward)


def _gradients(problem: CutProblem) -> set[str]:
    """Values that are gradients of parameters, or what one is the sum of, as of tied weights."""
    by_name = problem.once(_by_name)
    found = set(problem.gradients)
    stack = list(found)
    while stack:
        value = by_name[stack.pop()]
        if value.kind not in (VIEW, POINTWISE):
            continue
        sized = (n for n in value.inputs if n in by_name and by_name[n].bytes == value.bytes)
        new = [name for name in sized if not by_name[name].forward and name not in found]
        found.update(new)
        stack += new
    return found


def _base(problem: CutProblem, name: str) -> str:
    """What a view shows."""
    by_name = problem.once(_by_name)
    while by_name[name].kind == VIEW:
        name = by_name[name].inputs[0]
    return name


def _by_name(problem: CutProblem) -> dict[str, Value]:
    return {value.name: value for value in (*problem.values, *problem.backward)}


# ---- other lengths -----------------------------------------------------------------------------
def _scaled(problem: CutProblem, traced: Traced, factor: float) -> CutProblem:
    grown = functools.partial(_grown, traced, factor)

    def value(old: Value) -> Value:
        size, us = grown(old.bytes), old.us * factor
        if old.kind == CALL and "scaled_dot_product" in old.name:  # of documents: they stay
            us = old.us * (factor * factor if size != old.bytes else 1)
        return dataclasses.replace(old, bytes=size, inner_bytes=grown(old.inner_bytes), us=us)

    def loop(old: Any) -> Any:
        results = tuple(dataclasses.replace(r, bytes=grown(r.bytes)) for r in old.results)
        return dataclasses.replace(old, results=results, us=old.us * factor)

    regions = tuple(
        dataclasses.replace(
            region,
            modes=tuple(
                dataclasses.replace(mode, loops=tuple(map(loop, mode.loops)))
                for mode in region.modes
            ),
        )
        for region in problem.regions
    )
    return dataclasses.replace(
        problem,
        values=tuple(map(value, problem.values)),
        backward=tuple(map(value, problem.backward)),
        regions=regions,
    )


def _grown(traced: Traced, factor: float, size: int) -> int:
    rows = (traced.batch * (traced.length + more) for more in _PADDED)
    return int(size * factor) if size and any(size % n == 0 for n in rows) else size
