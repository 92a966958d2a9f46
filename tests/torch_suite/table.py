"""The results as a table, one row for each file, and what failed or could not run, with why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.torch_suite.files import SuiteFile
from tests.torch_suite.runner import MST, TORCH, Results, failures

_HEAD = (
    "| file | what it tests | found | run | call mst | pass | fail under Inductor too | fail "
    "| skipped | not run yet |"
)

Known = Mapping[tuple[str, str], Results]


def markdown(files: Sequence[SuiteFile], known: Known) -> str:
    """The table, the failures that Inductor does not have, and why others were skipped."""
    rows = [_HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    rows += [_row(file, known) for file in files]
    sections = ["\n".join(rows)]
    sections += _titled("Cannot be run", _unrun(files, known))
    sections += _titled("Failures that Inductor does not have", _failed(files, known))
    sections += _titled("Skipped", _skipped(files, known))
    return "\n\n".join(sections) + "\n"


def _row(file: SuiteFile, known: Known) -> str:
    results = known.get((file.name, MST), Results())
    rows = results.tests.values()
    kinds = Counter(row["outcome"] for row in rows)
    reached = sum(bool(row.get("calls")) for row in rows if row["outcome"] != "skipped")
    ours = len(own_failures(file, known))
    numbers = (
        results.collected or 0,
        kinds["passed"] + kinds["failed"],
        reached,
        kinds["passed"],
        kinds["failed"] - ours,
        ours,
        kinds["skipped"],
        max(0, (results.collected or 0) - len(rows)),
    )
    name = file.name + (f" (`-k '{file.chosen}'`)" if file.chosen else "")
    return f"| {name} | {file.about} | " + " | ".join(map(str, numbers)) + " |"


def own_failures(file: SuiteFile, known: Known) -> list[str]:
    """The tests that fail, and of which it is not known that they fail under Inductor as well."""
    theirs = known.get((file.name, TORCH), Results()).tests
    failed = failures(known.get((file.name, MST), Results()))
    return [n for n in failed if theirs.get(n, {}).get("outcome") != "failed"]


def _titled(title: str, lines: Iterator[str]) -> list[str]:
    found = list(lines)
    return [f"## {title}", "\n".join(found)] if found else []


def _unrun(files: Sequence[SuiteFile], known: Known) -> Iterator[str]:
    for file in files:
        error = known.get((file.name, MST), Results()).error
        if error:
            lines = [line for line in error.splitlines() if re.match(r"E\s|\w*Error", line)]
            yield f"- {file.name}: {(lines or ['no test is found'])[-1].lstrip('E ')}"


def _failed(files: Sequence[SuiteFile], known: Known) -> Iterator[str]:
    for file in files:
        tests = known.get((file.name, MST), Results()).tests
        for name in own_failures(file, known):
            yield f"- {file.name} `{name}`: {_first_line(tests[name])}"


def _skipped(files: Sequence[SuiteFile], known: Known) -> Iterator[str]:
    """How many tests were skipped, by reason."""
    reasons: Counter[str] = Counter()
    for file in files:
        for row in known.get((file.name, MST), Results()).tests.values():
            if row["outcome"] == "skipped":
                reasons[_first_line(row)] += 1
    for reason, count in reasons.most_common():
        yield f"- {count}: {reason}"


def _first_line(row: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in row["reason"].splitlines() if line.strip()]
    return lines[0][:200] if lines else "no reason given"
