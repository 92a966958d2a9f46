"""``LintReport``: the linter's findings on one step, as attributes, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from mstpass.errors import UserError
from mstpass.plain_data import printable
from mstpass.report.layer_paths import fold_numbers, group_by

NESTED = "nested checkpoints"
REPEATED_BACKWARD = "repeated backward"
DEAD = "dead recompute"
DUPLICATE = "duplicate"
SAVED = "recomputed though saved"
BOUNDARY = "recomputed block output"
NARROW = "32-bit offsets"
UNKNOWN = "unknown"


class LintError(UserError):
    """The step cannot be linted. The message says what to change."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Work that a step does more often than it needs to.

    Attributes:
        kind: ``"nested checkpoints"``, ``"repeated backward"``, ``"dead recompute"`` or
            ``"unknown"``; of compiled graphs ``"duplicate"``, ``"recomputed though saved"``,
            ``"recomputed block output"`` or ``"dead recompute"``, and ``"32-bit offsets"``, which
            wastes nothing: the kernel of a call is not right for tensors of this size.
        module: path of the module, or name of the checkpointed function; in a compiled graph, name
            of the node.
        forward_runs: runs of the module's op in the forward; of several ops, of the one that ran
            most often.
        recompute_runs: runs of the same op in the backward.
        wasted_flops: flops beyond those that the step needs, of matmuls, attention and
            convolutions.
        wasted_share: ``wasted_flops`` as a fraction of the step's flops.
        cause: why the step computes it more often than needed.
        fix: what to change.
        source: where its checkpoints are called, the outermost first; in a compiled graph, the line
            of the model's code.
    """

    kind: str
    module: str
    forward_runs: int
    recompute_runs: int
    wasted_flops: int
    wasted_share: float
    cause: str
    fix: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class ModuleRuns:
    """How often a module's forward ran: in the forward, and recomputed in the backward."""

    module: str
    forward_runs: int = 0
    recompute_runs: int = 0
    forward_flops: int = 0
    recompute_flops: int = 0


@dataclasses.dataclass(frozen=True)
class LintReport:
    """What the linter found in one step.

    Attributes:
        findings: the most wasteful first.
        step_flops: flops of the whole step.
        modules: one entry per module, in the order in which they first ran; empty for graphs.
        notes: remarks that are no findings, such as two checkpoints of which one has no effect.
    """

    findings: tuple[Finding, ...]
    step_flops: int
    modules: tuple[ModuleRuns, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        findings: Iterable[Finding],
        step_flops: int,
        modules: tuple[ModuleRuns, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> LintReport:
        """The report on findings in any order, whose shares of this step are not known yet."""
        share = 1 / step_flops if step_flops else 0.0
        of_step = (dataclasses.replace(f, wasted_share=f.wasted_flops * share) for f in findings)
        ordered = tuple(sorted(of_step, key=lambda finding: -finding.wasted_flops))
        return LintReport(ordered, step_flops, modules, notes)

    @property
    def wasted_flops(self) -> int:
        return sum(finding.wasted_flops for finding in self.findings)

    @property
    def wasted_share(self) -> float:
        return self.wasted_flops / self.step_flops if self.step_flops else 0.0

    def above(self, min_share: float) -> LintReport:
        """The report without findings below this share of the step's flops.

        Findings of equal layers are compared by their sum. What is wrong, not slow, stays.
        """
        kept = [
            finding
            for group in grouped(self.findings)
            if group[0].kind == NARROW or sum(f.wasted_share for f in group) >= min_share
            for finding in group
        ]
        return dataclasses.replace(self, findings=tuple(kept))

    def to_dict(self) -> dict[str, Any]:
        totals = {"wasted_flops": self.wasted_flops, "wasted_share": self.wasted_share}
        return {**dataclasses.asdict(self), **totals}

    def to_json(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)

    def __str__(self) -> str:
        return printable("\n".join(_lines(self)))


def _lines(report: LintReport) -> list[str]:
    lines = [f"mstpass lint: {_headline(report)}"]
    for group in grouped(report.findings):
        lines += _finding_lines(group)
    return lines + [f"  note: {note}" for note in report.notes]


def _headline(report: LintReport) -> str:
    if not report.findings:
        return f"nothing is computed more often than needed ({_flops(report.step_flops)} per step)"
    count = len(report.findings)
    return (
        f"{count} finding{'s' if count > 1 else ''}; {report.wasted_share:.1%} of the step's "
        f"{_flops(report.step_flops)} wasted"
    )


def grouped(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Groups of findings that differ only in the numbers in their paths: layers of a model."""
    return group_by(
        findings,
        lambda f: dataclasses.replace(f, module=fold_numbers(f.module), wasted_share=0.0),
    )


def summed_up(names: Iterable[str]) -> str:
    """Paths as text, such as ``model.layers.* (32 of them), head``.

    Paths that differ only in their numbers are one entry.
    """
    return ", ".join(
        f"{fold_numbers(alike[0])} ({len(alike)} of them)" if len(alike) > 1 else alike[0]
        for alike in group_by(names, fold_numbers)
    )


def _finding_lines(group: list[Finding]) -> list[str]:
    first = group[0]
    several = len(group) > 1
    flops, share = (sum(f.wasted_flops for f in group), sum(f.wasted_share for f in group))
    lines = [f"  {summed_up(f.module for f in group)}: {first.kind}"]
    if first.kind != NARROW:
        lines += [
            f"    ran     {first.forward_runs}x in forward, "
            f"recomputed {first.recompute_runs}x in backward{' (each)' if several else ''}",
            f"    wasted  {_flops(flops)}, {share:.1%} of the step",
        ]
    lines += [f"    cause   {first.cause}", f"    fix     {first.fix}"]
    return lines + ([f"    at      {first.source}"] if first.source else [])


def module_lines(report: LintReport) -> list[str]:
    """A table as lines of text: for each module, how often its forward ran."""
    width = max((len(m.module) for m in report.modules), default=6)
    rows = [f"{'module':<{width}}  forward  recomputed  flops per run"]
    for runs in report.modules:
        total = runs.forward_flops + runs.recompute_flops
        times = runs.forward_runs + runs.recompute_runs
        rows.append(
            f"{runs.module:<{width}}  {runs.forward_runs:>7}  {runs.recompute_runs:>10}  "
            f"{_flops(total // max(times, 1)):>13}"
        )
    return rows


def _flops(count: int) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}flop"
    return f"{count} flop"
