"""Findings on an eager step: how much of its recomputation is wasted, why, and what to change.

A checkpointed op runs once in the forward, and has to run at most once more in the backward. Let
the ops of one `OpKey` run ``f`` times in the forward and ``r`` times in the backward. Of these
``r`` runs, ``d`` are dead: no op that computes a gradient depends on them (eager_trace.py). Then::

    repeated = max(0, r - f)           recomputations beyond one per run in the forward
    dead     = max(0, d - repeated)    other recomputations whose results nothing needs

Runs are counted by module, not by call: a module that is shared or called several times may be
recomputed once per call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mstpass.linter import report
from mstpass.linter.eager_trace import CheckpointCall, OpKey, OpRuns, StepTrace, Target
from mstpass.report.layer_paths import group_by
from mstpass.tracing.names import function_name, module_names

Names = Mapping[int, str]  # of modules, by id


@dataclass(frozen=True)
class _Waste:
    """For one key: the runs in the backward that were repeated, and those that were dead."""

    key: OpKey
    runs: OpRuns
    repeated: int
    dead: int


def lint_trace(trace: StepTrace) -> report.LintReport:
    """The report on a recorded step."""
    modules = (module for module, _ in trace.modules.values())
    names = module_names([*trace.roots.values(), *modules])
    live = trace.liveness.live_ops()
    wastes = [_waste(key, runs, live) for key, runs in trace.runs.items()]
    findings = [*_repeated(wastes, names, _inner_targets(trace.runs)), *_dead(wastes, names)]
    runs = tuple(report.ModuleRuns(names[i], **counts) for i, (_, counts) in trace.modules.items())
    return report.LintReport.of(findings, trace.step_flops, runs, _free_nesting(wastes, names))


def _waste(key: OpKey, runs: OpRuns, live: list[bool]) -> _Waste:
    if not runs.forward:  # its forward ran before the recording began
        return _Waste(key, runs, 0, 0)
    repeated = max(0, len(runs.recomputed) - runs.forward)
    dead = sum(number is not None and not live[number] for number in runs.recomputed)
    return _Waste(key, runs, repeated, max(0, dead - repeated))


def _repeated(
    wastes: list[_Waste], names: Names, inner_targets: Mapping[CheckpointCall, set[Target]]
) -> Iterator[report.Finding]:
    """A finding for each checkpointed module; without a checkpoint, for each repeated module."""
    repeated = ((_name(names, w.key.target, w.key), w) for w in wastes if w.repeated)
    for name, group in _by_name(repeated):
        worst = max(group, key=lambda w: w.repeated)
        flops = sum(w.repeated * w.runs.flops for w in group)
        yield _finding(name, worst.runs, flops, *_why_repeated(worst.runs, inner_targets))


def _dead(wastes: list[_Waste], names: Names) -> Iterator[report.Finding]:
    for name, group in _by_name((_name(names, None, w.key), w) for w in wastes if w.dead):
        runs = group[0].runs
        reentrant = next((call for call in reversed(runs.checkpoints) if call.reentrant), None)
        cause = "it is recomputed, but no gradient depends on its result"
        fix = (
            "move it out of the checkpoint, or to the end of the checkpointed block: "
            "recomputation stops before it there"
        )
        if reentrant is not None:
            cause += "; a reentrant checkpoint always recomputes its whole block"
            fix = f"{_caller(reentrant).non_reentrant}: such a checkpoint stops before this op"
        yield _finding(
            name, runs, sum(w.dead * w.runs.flops for w in group), report.DEAD, cause, fix
        )


def _by_name(named: Iterable[tuple[str, _Waste]]) -> Iterator[tuple[str, list[_Waste]]]:
    for group in group_by(named, lambda pair: pair[0]):
        yield group[0][0], [waste for _, waste in group]


def _finding(
    name: str, runs: OpRuns, flops: int, kind: str, cause: str, fix: str
) -> report.Finding:
    source = ", ".join(call.location for call in runs.checkpoints)
    return report.Finding(
        kind, name, runs.forward, len(runs.recomputed), flops, 0.0, cause, fix, source
    )


def _why_repeated(
    runs: OpRuns, inner_targets: Mapping[CheckpointCall, set[Target]]
) -> tuple[str, str, str]:
    """The kind of the finding, its cause, and its fix."""
    nested = len(runs.checkpoints) > 1
    # a reentrant checkpoint starts a backward of its own; otherwise the user has started each
    if len(runs.backward_ids) > 1 and not (nested and any(c.reentrant for c in runs.checkpoints)):
        return (
            report.REPEATED_BACKWARD,
            f"{len(runs.backward_ids)} backwards went through its checkpoint, "
            "and each of them recomputed it",
            "add up the losses and call backward once",
        )
    if nested:
        return report.NESTED, *_why_nested(runs.checkpoints, inner_targets)
    return (
        report.UNKNOWN,
        "its forward ran in the backward more often than in the forward, and it is not in "
        "nested checkpoints",
        "look for an autograd function or a hook that calls it in the backward",
    )


def _why_nested(
    checkpoints: tuple[CheckpointCall, ...], inner_targets: Mapping[CheckpointCall, set[Target]]
) -> tuple[str, str]:
    """The cause and the fix where checkpoints are nested."""
    outer, inner = checkpoints[-2:]
    styles = tuple("reentrant" if call.reentrant else "non-reentrant" for call in (inner, outer))
    how = " in ".join(styles) if styles[0] != styles[1] else f"both {styles[0]}"
    cause = f"{_caller(outer).name} around {_caller(inner).name} ({how})"
    if len(checkpoints) > 2:
        cause += f", {len(checkpoints)} checkpoints in all"
    # propose to remove the reentrant one first: it recomputes its whole block
    first, second = (outer, inner) if outer.reentrant and not inner.reentrant else (inner, outer)
    fix = f"keep one of the two: {_caller(first).removal}, or {_caller(second).removal}"
    parts = len(inner_targets.get(outer, ()))
    if parts > 1:
        cause += f"; to get their inputs, the outer one runs {parts} inner ones once more"
        fix += "; keep both only if you need their memory more than this time"
    return cause, fix


class _Caller(NamedTuple):
    """Whose code calls a checkpoint: its name, how to remove the call or make it non-reentrant."""

    name: str
    removal: str
    non_reentrant: str


def _caller(call: CheckpointCall) -> _Caller:
    if call.file.endswith("_checkpoint/checkpoint_wrapper.py"):
        return _Caller(
            "FSDP activation checkpointing" if call.fsdp else "checkpoint_wrapper",
            "leave out apply_activation_checkpointing (checkpoint_wrapper)",
            "pass checkpoint_impl=CheckpointImpl.NO_REENTRANT to checkpoint_wrapper",
        )
    if "/transformers/" in call.file:
        return _Caller(
            "Hugging Face gradient checkpointing",
            "call model.gradient_checkpointing_disable()",
            "pass gradient_checkpointing_kwargs={'use_reentrant': False}",
        )
    return _Caller(
        f"checkpoint() at {call.location}",
        f"remove the checkpoint() call at {call.location}",
        f"pass use_reentrant=False in the checkpoint() call at {call.location}",
    )


def _inner_targets(runs: Mapping[OpKey, OpRuns]) -> dict[CheckpointCall, set[Target]]:
    """For each checkpoint: the targets of the checkpoints directly inside of it."""
    inner_targets: dict[CheckpointCall, set[Target]] = {}
    for op in runs.values():
        for outer, inner in itertools.pairwise(op.checkpoints):
            inner_targets.setdefault(outer, set()).add(inner.target)
    return inner_targets


def _free_nesting(wastes: list[_Waste], names: Names) -> tuple[str, ...]:
    """Notes on two checkpoints around one target that waste nothing, as both stop early."""
    free: dict[tuple[str, str], set[str]] = {}
    costly = {w.key.target for w in wastes if w.repeated}
    for waste in wastes:
        calls, target = waste.runs.checkpoints, waste.key.target
        if len(calls) < 2 or target in costly or calls[-2].target != target:
            continue
        pair = (_caller(calls[-2]).name, _caller(calls[-1]).name)
        free.setdefault(pair, set()).add(_name(names, target, waste.key))
    return tuple(
        f"{report.summed_up(sorted(targets))}: {outer} around {inner} costs no flops, because both "
        "stop early; remove one of them"
        for (outer, inner), targets in free.items()
    )


def _name(names: Names, target: Target | None, key: OpKey) -> str:
    """The name of a checkpoint's target if given, else of the op's module."""
    module = key.module if target is None else None
    target = target or key.target
    if module is None and target is not None:
        module = target.module
    if module is not None:
        return names.get(id(module), type(module).__name__)
    return key.op if target is None else function_name(target.function)
