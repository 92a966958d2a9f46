"""From what a step ran to findings: how much of it was wasted, why, and what to remove.

An op of a checkpoint is needed once in forward and at most once again in backward. For ops of one
`Key`, ``f`` runs in forward, ``r`` again in backward, ``d`` of these dead (nothing that computes a
gradient reads them, liveness.py)::

    repeated = max(0, r - f)           the forward ran again more often than it had run
    dead     = max(0, d - repeated)    what is left was recomputed for nothing

Counting by module, not by call, makes modules that are shared or called several times come out
right: each call may be recomputed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mstpass.linter.eager_trace import Key, OpRuns, Site, StepTrace, Target
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
    """Of one key: how many of its runs in backward were too many, and how many of no use."""

    key: Key
    runs: OpRuns
    repeated: int
    dead: int


def lint_trace(trace: StepTrace) -> LintReport:
    """The report of a step that has run."""
    names = module_names([*trace.roots.values(), *(c.module for c in trace.modules.values())])
    namer = _Namer(names)
    used = trace.flow.used()
    wastes = [_waste(key, runs, used) for key, runs in trace.runs.items()]
    around = _inner_targets(trace.runs)
    share = 1 / trace.step_flops if trace.step_flops else 0.0
    findings = [
        *_repeated(wastes, namer, around, share),
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


def _waste(key: Key, runs: OpRuns, used: list[bool]) -> _Waste:
    if not runs.forward:  # its forward ran before the trace: nothing to compare with
        return _Waste(key, runs, 0, 0)
    repeated = max(0, len(runs.recomputed) - runs.forward)
    dead = sum(number is not None and not used[number] for number in runs.recomputed)
    return _Waste(key, runs, repeated, max(0, dead - repeated))


def _repeated(
    wastes: list[_Waste], namer: _Namer, around: Mapping[Site, set[Target]], share: float
) -> list[Finding]:
    """One for each checkpointed module; without a checkpoint, for each module that ran again."""
    findings = []
    for name, group in _by(wastes, lambda w: namer.of(w.key.target, w.key), "repeated").items():
        worst = max(group, key=lambda w: w.repeated)
        kind, cause, fix = _why_repeated(worst.runs, around)
        flops = sum(w.repeated * w.runs.flops for w in group)
        findings.append(_finding(kind, name, worst.runs, flops, share, cause, fix))
    return findings


def _dead(wastes: list[_Waste], namer: _Namer, share: float) -> list[Finding]:
    findings = []
    for name, group in _by(wastes, lambda w: namer.of(None, w.key), "dead").items():
        runs = group[0].runs
        reentrant = next((site for site in reversed(runs.sites) if site.reentrant), None)
        cause = "backward reads neither its result nor anything computed from it"
        if reentrant is not None:
            cause += "; a reentrant checkpoint runs its block to the end all the same"
            fix = f"{_without_reentrant(reentrant)}: it stops recomputing before such ops"
        else:
            fix = "take it out of the checkpoint, or move it to its end, where recomputing stops"
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
    source = ", ".join(site.location for site in runs.sites)
    times = (runs.forward, len(runs.recomputed))
    return Finding(kind, name, *times, flops, flops * share, cause, fix, source)


def _why_repeated(runs: OpRuns, around: Mapping[Site, set[Target]]) -> tuple[str, str, str]:
    """Kind, cause and fix."""
    nested = len(runs.sites) > 1
    # without a reentrant checkpoint only a call of backward starts another backward
    if len(runs.backward_ids) > 1 and not (nested and any(s.reentrant for s in runs.sites)):
        return (
            REPEATED_BACKWARD,
            f"backward went {len(runs.backward_ids)} times through its checkpoint, "
            "which recomputed it each time",
            "add up the losses and call backward once",
        )
    if nested:
        return NESTED, *_why_nested(runs.sites, around)
    return (
        UNKNOWN,
        "its forward ran again in backward, but no two checkpoints are around it",
        "look for an autograd function or a hook that calls it in backward",
    )


def _why_nested(sites: tuple[Site, ...], around: Mapping[Site, set[Target]]) -> tuple[str, str]:
    outer, inner = sites[-2:]
    styles = tuple("reentrant" if site.reentrant else "non-reentrant" for site in (inner, outer))
    how = " in ".join(styles) if styles[0] != styles[1] else f"both {styles[0]}"
    cause = f"{_describe(outer)} around {_describe(inner)} ({how})"
    if len(sites) > 2:
        cause += f", {len(sites)} checkpoints in all"
    # the reentrant one goes first: it runs its block to the end
    first, second = (outer, inner) if outer.reentrant and not inner.reentrant else (inner, outer)
    fix = f"keep one of the two: {_removal(first)}, or {_removal(second)}"
    parts = len(around.get(outer, ()))
    if parts > 1:
        cause += f"; the outer one reruns {parts} inner ones to get at their inputs"
        fix += "; both together trade this time for memory"
    return cause, fix


def _is_wrapper(site: Site) -> bool:
    return site.file.endswith("_checkpoint/checkpoint_wrapper.py")


def _is_hugging_face(site: Site) -> bool:
    return "/transformers/" in site.file


def _describe(site: Site) -> str:
    if _is_wrapper(site):
        return "FSDP activation checkpointing" if site.fsdp else "checkpoint_wrapper"
    if _is_hugging_face(site):
        return "Hugging Face gradient checkpointing"
    return f"checkpoint() at {site.location}"


def _removal(site: Site) -> str:
    if _is_wrapper(site):
        return "leave out apply_activation_checkpointing (checkpoint_wrapper)"
    if _is_hugging_face(site):
        return "call model.gradient_checkpointing_disable()"
    return f"remove the checkpoint() call at {site.location}"


def _without_reentrant(site: Site) -> str:
    if _is_wrapper(site):
        return "checkpoint_wrapper(..., checkpoint_impl=CheckpointImpl.NO_REENTRANT)"
    if _is_hugging_face(site):
        return "gradient_checkpointing_kwargs={'use_reentrant': False}"
    return f"use_reentrant=False in the checkpoint() call at {site.location}"


def _inner_targets(runs: Mapping[Key, OpRuns]) -> dict[Site, set[Target]]:
    """By checkpoint: around which other ones it goes."""
    around: dict[Site, set[Target]] = {}
    for op in runs.values():
        for outer, inner in zip(op.sites, op.sites[1:], strict=False):
            around.setdefault(outer, set()).add(inner.target)
    return around


def _free_nesting(wastes: list[_Waste], namer: _Namer) -> tuple[str, ...]:
    """Two checkpoints around one thing that cost nothing: recomputing stops early."""
    free: dict[tuple[str, str], set[str]] = {}
    costly = {w.key.target for w in wastes if w.repeated}
    for waste in wastes:
        sites, target = waste.runs.sites, waste.key.target
        if len(sites) < 2 or target in costly or sites[-2].target != target:
            continue
        pair = (_describe(sites[-2]), _describe(sites[-1]))
        free.setdefault(pair, set()).add(namer.of(target, waste.key))
    return tuple(
        f"{summed_up(sorted(names))}: {outer} around {inner} costs no flops as both stop early, "
        "but one is enough"
        for (outer, inner), names in free.items()
    )


class _Namer:
    """What a finding calls a key: its checkpoint's target where given, else the op's module."""

    def __init__(self, names: Mapping[int, str]):
        self._names = names

    def of(self, target: Target | None, key: Key) -> str:
        module = target.module if target is not None else key.module
        if module is not None:
            return self._names.get(id(module), type(module).__name__)
        target = target or key.target
        if target is None:
            return key.op
        if target.module is not None:
            return self._names.get(id(target.module), type(target.module).__name__)
        return function_name(target.function)
