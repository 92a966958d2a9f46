"""The partition problems of a model's training step, traced on fake tensors for a GPU.

The step of a model that is traced: of one device, or of one of the ranks that share a sequence.

The ranks are those of `mstpass.sequence_parallel`, as a training script would call it; only their
process group is pretended. The last rank is planned: in a ring it has the most work, since its
queries see the keys of all others, and under Ulysses all ranks have the same.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from mstpass import pipeline
from mstpass.errors import UserError
from mstpass.graph.collectives import collectives_of
from mstpass.graph.joint import JointGraph, value_of
from mstpass.graph.narrow_offsets import narrow_call
from mstpass.integrations.transformers_masks import no_positions_given
from mstpass.normalize.masks_as_flags import masks_as_flags
from mstpass.options import Options
from mstpass.planner.models import build
from mstpass.planner.scale_to_length import scaled
from mstpass.planner.training import Training
from mstpass.problem.op import VIEW
from mstpass.problem.problem import CutProblem, Value
from mstpass.sequences import sequence_parallel, shard_sequence
from mstpass.torch_internals.fake_tensors import FakeTensor
from mstpass.torch_internals.graphs import tree_map
from mstpass.torch_internals.pretended_ranks import NoPretendedRanks, pretended_ranks
from mstpass.torch_internals.settings import no_collection_after_tracing
from mstpass.tracing.joint_graphs import trace_one_graph

_SHORTER = 0.99  # a length is rounded down to at least this fraction of it


class SequenceError(UserError):
    """The ranks cannot share the model's sequences."""


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A step to trace.

    Attributes:
        length: tokens of each sequence on this rank.
        loss_of: takes ``inputs``.
        device: all tensors stand for tensors there; None: the step runs where its tensors are.
    """

    length: int
    loss_of: Callable[..., Any]
    inputs: Mapping[str, Any]
    device: torch.device | None = None


@contextlib.contextmanager
def model_step(
    config: Any,
    training: Training,
    length: int,
    multiple: int | None = None,
    layers: int | None = None,
) -> Iterator[ModelStep]:
    """The step of a rank with ``length`` tokens of each sequence.

    Args:
        multiple: None: the step has just so many tokens. Otherwise about as many, a multiple of
            this number, that tell apart what has a row for each token (`distinct_length`).

    Raises:
        SequenceError: the ranks cannot share the model's sequences.
    """
    config = copy.deepcopy(config)  # sequence_parallel names its attention in it
    with torch.device("meta"):
        model = build(config, training, layers)
    if multiple is not None:
        length = distinct_length({n for p in model.parameters() for n in p.shape}, length, multiple)
    with (
        _shared(model, training, length)
        if training.shares
        else _own(model, training, length) as step
    ):
        yield step


@contextlib.contextmanager
def _own(model: nn.Module, training: Training, length: int) -> Iterator[ModelStep]:
    tied = model.config.get_text_config().tie_word_embeddings  # type: ignore[union-attr, operator]
    model = model.to_empty(device="cpu")  # reserved, never written
    if tied:
        model.tie_weights()  # type: ignore[operator]
    ids_BS = torch.zeros(training.batch, length, dtype=torch.long)
    loss_of = _loss(model, training, "cpu")
    with no_positions_given(model):  # as ``mstpass.compile(model)`` says
        yield ModelStep(length, lambda ids: loss_of(input_ids=ids, labels=ids), {"ids": ids_BS})


@contextlib.contextmanager
def _shared(model: nn.Module, training: Training, length: int) -> Iterator[ModelStep]:
    device = torch.device("cuda")
    with part_of_rank(model, training, length, "meta") as part:
        yield ModelStep(length, _loss(model, training, device.type), part, device)


@contextlib.contextmanager
def part_of_rank(
    model: nn.Module, training: Training, length: int, device: str
) -> Iterator[dict[str, Any]]:
    """The last rank's part of a batch, as keywords of a model that shares its sequences in here.

    Raises:
        SequenceError: the ranks cannot share the model's sequences.
    """
    ranks = training.sequence_ranks
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(pretended_ranks(ranks, ranks - 1))
            sequence_parallel(model, head_groups=training.head_groups)
        except (ValueError, NoPretendedRanks) as error:
            raise SequenceError(f"--sequence-parallel {ranks}: {error}") from error
        ids_BS = torch.zeros(training.batch, ranks * length, dtype=torch.long, device=device)
        yield shard_sequence({"input_ids": ids_BS, "labels": ids_BS}, check=False)


def _loss(model: nn.Module, training: Training, device: str) -> Callable[..., Any]:
    def loss_of(**batch: Tensor) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=training.dtype == "autocast"):
            return model(**batch).loss

    return loss_of


def distinct_length(dims: Collection[int], length: int, multiple: int) -> int:
    """A multiple near ``length`` that has a prime factor which no dim of a parameter has.

    The number of bytes of a value then tells whether the value has a row for each token.
    """

    def is_distinct(length: int) -> bool:
        rest, common = length, math.lcm(*dims)
        while (shared := math.gcd(rest, common)) > 1:
            rest //= shared
        return rest > 1

    start = max(multiple, length // multiple * multiple)
    shorter = range(start, int(_SHORTER * start), -multiple)
    longer = itertools.count(start + multiple, multiple)
    return next(n for n in itertools.chain(shorter, longer) if is_distinct(n))


# ---- its trace -----------------------------------------------------------------------------------
_DEVICE = torch.device("cuda", 0)  # its costs decide chunk lengths; nothing runs there


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The partition problems of one joint graph.

    Attributes:
        batch: sequences of the traced step.
        length: tokens of each, on one of the ranks that share it.
        problems: the problem under each ``memory_budget``.
        logits: names of the values of tokens x vocabulary.
        square_bytes: of the largest mask or scores, which have a row and a column for each token; 0
            where attention needs none.
        exchanges: names of the collectives.
        narrow: calls whose kernels are not made for tensors as large as they have outside of loops,
            and what is wrong with them.
    """

    batch: int
    length: int
    problems: Mapping[object, CutProblem]
    logits: frozenset[str]
    square_bytes: int = 0
    exchanges: frozenset[str] = frozenset()
    narrow: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def problem_at(
        self, length: int, memory_budget: object, batch: int | None = None
    ) -> CutProblem:
        """The problem under a budget, for sequences of ``length`` tokens, ``batch`` of them."""
        problem = self.problems[memory_budget]
        if length == self.length and batch in (None, self.batch):
            return problem
        return scaled(problem, self.batch, self.length, length, batch)


@pipeline.collector_paused()
def trace(
    config: Any,
    training: Training,
    length: int,
    budgets: tuple[object, ...],
    multiple: int | None = None,
    layers: int | None = None,
    host_bytes: int = 0,
) -> TracedStep:
    """Trace a training step and make its problem for each ``memory_budget``.

    Args:
        multiple: as of `model_step`: with one, the result can be scaled.
        host_bytes: host memory in which saved values may wait.
        layers: trace only so many of the model's layers, the first ones (None: all).
    """

    def take(module: fx.GraphModule, torch_kwargs: Mapping[str, Any]) -> TracedStep:
        num_fwd_outputs = torch_kwargs["num_fwd_outputs"]
        if step.device is None:
            _move_to_gpu(module)
        logits = _logits(module, config.vocab_size)
        problems = {}
        for budget in budgets:
            given = {"memory_budget": budget, "solver": "min_cut", "host_budget": host_bytes}
            options = Options.parse(given)
            result = pipeline.run(
                module, options, num_fwd_outputs=num_fwd_outputs, stop_after="plan"
            )
            assert result.problem is not None, "the problem is known"
            # What Inductor alone needs at the traced length and depth is no limit at others.
            problem = dataclasses.replace(result.problem, alone=None)
            problems[budget] = _with_sharded_gradients(problem, training)
        joint = masks_as_flags(JointGraph(module, num_fwd_outputs)).joint
        squares = _square_bytes(joint, step.length * training.sequence_ranks)
        exchanges = frozenset(node.name for node in collectives_of(joint))
        calls = ((node.name, narrow_call(node)) for node in joint.nodes)
        narrow = {name: str(call) for name, call in calls if call is not None}
        more = squares, exchanges, narrow
        return TracedStep(training.batch, step.length, problems, logits, *more)

    with (
        model_step(config, training, length, multiple, layers) as step,
        no_collection_after_tracing(),
    ):
        return trace_one_graph(step.loss_of, (), step.inputs, take, device=step.device)


def _move_to_gpu(module: fx.GraphModule) -> None:
    """Change the graph as if it had been traced on a GPU, so that a GPU's costs apply."""
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(_on_gpu, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _DEVICE}


def _on_gpu(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=_DEVICE
        ).requires_grad_(value.requires_grad)


def _logits(module: fx.GraphModule, vocabulary: int) -> frozenset[str]:
    """Values whose last dim is the vocabulary, but for weights and their gradients."""
    placeholders = map(value_of, module.graph.find_nodes(op="placeholder"))
    inputs = {tuple(value.shape) for value in placeholders if value is not None}
    inputs |= {shape[::-1] for shape in inputs}
    return frozenset(
        node.name
        for node in module.graph.nodes
        if (value := value_of(node)) is not None
        and value.dim() > 1
        and value.shape[-1] == vocabulary
        and tuple(value.shape) not in inputs
    )


def _square_bytes(joint: JointGraph, length: int) -> int:
    """Bytes of the largest value ``[B, heads or 1, length, length]``."""
    values = map(value_of, joint.nodes)
    squares = (v for v in values if v is not None and v.dim() == 4 and v.shape[2:] == (length,) * 2)
    return max((v.untyped_storage().nbytes() for v in squares), default=0)


def _with_sharded_gradients(problem: CutProblem, training: Training) -> CutProblem:
    """Count only a rank's share of each gradient, from the op that computes it."""
    if training.gradient_shards == 1:
        return problem
    by_name = {value.name: value for value in (*problem.values, *problem.backward)}
    gradients = {_base(by_name, name) for name in problem.gradients}
    backward = tuple(
        dataclasses.replace(value, bytes=-(-value.bytes // training.gradient_shards))
        if value.name in gradients
        else value
        for value in problem.backward
    )
    return dataclasses.replace(problem, backward=backward)


def _base(by_name: Mapping[str, Value], name: str) -> str:
    """The value that owns the memory of a view."""
    while by_name[name].kind == VIEW:
        name = by_name[name].inputs[0]
    return name
