"""Findings on an eager step: how much of its recomputation is wasted, why, and what to change.

A checkpointed op runs once in the forward, and has to run at most once more in the backward. Let
the ops of one `OpKey` run ``f`` times in the forward and ``r`` times in the backward. Of these
``r`` runs, ``d`` are dead: no op that computes a gradient depends on them (liveness.py). Then::

    repeated = max(0, r - f)           recomputations beyond one per run in the forward
    dead     = max(0, d - repeated)    other recomputations whose results nothing needs

Runs are counted by module, not by call: a module that is shared or called several times may be
recomputed once per call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mstpass.linter.eager_trace import CheckpointCall, OpKey, OpRuns, StepTrace, Target
from mstpass.linter.report import (
    DEAD,
    NESTED,
    REPEATED_BACKWARD,
    UNKNOWN,
    Finding,
    LintReport,
    ModuleRuns,
    summed_up,
)
from mstpass.tracing.names import function_name, module_names


@dataclass(frozen=True)
class _Waste:
    """For one key: the runs in the backward that were repeated, and those that were dead."""

    key: OpKey
    runs: OpRuns
    repeated: int
    dead: int


def lint_trace(trace: StepTrace) -> LintReport:
    """The report on a recorded step."""
    names = module_names([*trace.roots.values(), *(c.module for c in trace.modules.values())])
    namer = _Namer(names)
    live = trace.liveness.live_ops()
    wastes = [_waste(key, runs, live) for key, runs in trace.runs.items()]
    inner_targets = _inner_targets(trace.runs)
    share = 1 / trace.step_flops if trace.step_flops else 0.0
    findings = [
        *_repeated(wastes, namer, inner_targets, share),
        *_dead(wastes, namer, share),
    ]
    return LintReport(
        tuple(sorted(findings, key=lambda finding: -finding.wasted_flops)),
        trace.step_flops,
        tuple(
            ModuleRuns(
                names[number],
                count.forward_runs,
                count.recompute_runs,
                count.forward_flops,
                count.recompute_flops,
            )
            for number, count in trace.modules.items()
        ),
        _free_nesting(wastes, namer),
    )


def _waste(key: OpKey, runs: OpRuns, live: list[bool]) -> _Waste:
    if not runs.forward:  # its forward ran before the recording began
        return _Waste(key, runs, 0, 0)
    repeated = max(0, len(runs.recomputed) - runs.forward)
    dead = sum(number is not None and not live[number] for number in runs.recomputed)
    return _Waste(key, runs, repeated, max(0, dead - repeated))


def _repeated(
    wastes: list[_Waste],
    namer: _Namer,
    inner_targets: Mapping[CheckpointCall, set[Target]],
    share: float,
) -> list[Finding]:
    """A finding for each checkpointed module; without a checkpoint, for each repeated module."""
    findings = []
    for name, group in _by(wastes, lambda w: namer.of(w.key.target, w.key), "repeated").items():
        worst = max(group, key=lambda w: w.repeated)
        kind, cause, fix = _why_repeated(worst.runs, inner_targets)
        flops = sum(w.repeated * w.runs.flops for w in group)
        findings.append(_finding(kind, name, worst.runs, flops, share, cause, fix))
    return findings


def _dead(wastes: list[_Waste], namer: _Namer, share: float) -> list[Finding]:
    findings = []
    for name, group in _by(wastes, lambda w: namer.of(None, w.key), "dead").items():
        runs = group[0].runs
        reentrant = next((call for call in reversed(runs.checkpoints) if call.reentrant), None)
        cause = "it is recomputed, but no gradient depends on its result"
        if reentrant is not None:
            cause += "; a reentrant checkpoint always recomputes its whole block"
            fix = f"{_without_reentrant(reentrant)}: such a checkpoint stops before this op"
        else:
            fix = (
                "move it out of the checkpoint, or to the end of the checkpointed block: "
                "recomputation stops before it there"
            )
        flops = sum(w.dead * w.runs.flops for w in group)
        findings.append(_finding(DEAD, name, runs, flops, share, cause, fix))
    return findings


def _by(wastes: list[_Waste], name: Callable[[_Waste], str], what: str) -> dict[str, list[_Waste]]:
    groups: dict[str, list[_Waste]] = {}
    for waste in wastes:
        if getattr(waste, what):
            groups.setdefault(name(waste), []).append(waste)
    return groups


def _finding(
    kind: str, name: str, runs: OpRuns, flops: int, share: float, cause: str, fix: str
) -> Finding:
    source = ", ".join(call.location for call in runs.checkpoints)
    times = (runs.forward, len(runs.recomputed))
    return Finding(kind, name, *times, flops, flops * share, cause, fix, source)


def _why_repeated(
    runs: OpRuns, inner_targets: Mapping[CheckpointCall, set[Target]]
) -> tuple[str, str, str]:
    """The kind of the finding, its cause, and its fix."""
    nested = len(runs.checkpoints) > 1
    # a reentrant checkpoint starts a backward of its own; otherwise the user has started each
    if len(runs.backward_ids) > 1 and not (nested and any(c.reentrant for c in runs.checkpoints)):
        return (
            REPEATED_BACKWARD,
            f"{len(runs.backward_ids)} backwards went through its checkpoint, "
            "and each of them recomputed it",
            "add up the losses and call backward once",
        )
    if nested:
        return NESTED, *_why_nested(runs.checkpoints, inner_targets)
    return (
        UNKNOWN,
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
    cause = f"{_describe(outer)} around {_describe(inner)} ({how})"
    if len(checkpoints) > 2:
        cause += f", {len(checkpoints)} checkpoints in all"
    # propose to remove the reentrant one first: it recomputes its whole block
    first, second = (outer, inner) if outer.reentrant and not inner.reentrant else (inner, outer)
    fix = f"keep one of the two: {_removal(first)}, or {_removal(second)}"
    parts = len(inner_targets.get(outer, ()))
    if parts > 1:
        cause += f"; to get their inputs, the outer one runs {parts} inner ones once more"
        fix += "; keep both only if you need their memory more than this time"
    return cause, fix


def _is_wrapper(call: CheckpointCall) -> bool:
    return call.file.endswith("_checkpoint/checkpoint_wrapper.py")


def _is_hugging_face(call: CheckpointCall) -> bool:
    return "/transformers/" in call.file


def _describe(call: CheckpointCall) -> str:
    if _is_wrapper(call):
        return "FSDP activation checkpointing" if call.fsdp else "checkpoint_wrapper"
    if _is_hugging_face(call):
        return "Hugging Face gradient checkpointing"
    return f"checkpoint() at {call.location}"


def _removal(call: CheckpointCall) -> str:
    if _is_wrapper(call):
        return "leave out apply_activation_checkpointing (checkpoint_wrapper)"
    if _is_hugging_face(call):
        return "call model.gradient_checkpointing_disable()"
    return f"remove the checkpoint() call at {call.location}"


def _without_reentrant(call: CheckpointCall) -> str:
    if _is_wrapper(call):
        return "pass checkpoint_impl=CheckpointImpl.NO_REENTRANT to checkpoint_wrapper"
    if _is_hugging_face(call):
        return "pass gradient_checkpointing_kwargs={'use_reentrant': False}"
    return f"pass use_reentrant=False in the checkpoint() call at {call.location}"


def _inner_targets(runs: Mapping[OpKey, OpRuns]) -> dict[CheckpointCall, set[Target]]:
    """For each checkpoint: the targets of the checkpoints directly inside of it."""
    inner_targets: dict[CheckpointCall, set[Target]] = {}
    for op in runs.values():
        for outer, inner in itertools.pairwise(op.checkpoints):
            inner_targets.setdefault(outer, set()).add(inner.target)
    return inner_targets


def _free_nesting(wastes: list[_Waste], namer: _Namer) -> tuple[str, ...]:
    """Notes on two checkpoints around one target that waste nothing, as both stop early."""
    free: dict[tuple[str, str], set[str]] = {}
    costly = {w.key.target for w in wastes if w.repeated}
    for waste in wastes:
        calls, target = waste.runs.checkpoints, waste.key.target
        if len(calls) < 2 or target in costly or calls[-2].target != target:
            continue
        pair = (_describe(calls[-2]), _describe(calls[-1]))
        free.setdefault(pair, set()).add(namer.of(target, waste.key))
    return tuple(
        f"{summed_up(sorted(names))}: {outer} around {inner} costs no flops, because both stop "
        "early; remove one of them"
        for (outer, inner), names in free.items()
    )


class _Namer:
    """Names for findings: that of a checkpoint's target if given, else of the op's module."""

    def __init__(self, names: Mapping[int, str]):
        self._names = names

    def of(self, target: Target | None, key: OpKey) -> str:
        module = target.module if target is not None else key.module
        if module is not None:
            return self._names.get(id(module), type(module).__name__)
        target = target or key.target
        if target is None:
            return key.op
        if target.module is not None:
            return self._names.get(id(target.module), type(target.module).__name__)
        return function_name(target.function)
