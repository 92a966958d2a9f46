"""Shrink a failing case to the plainest case that fails in the same way, and make it a test.

Every field of a case lists its values, the plainest first (case.py). A case is made smaller by one
step at a time: a layer or an item less, or a field at an earlier value of its list. A step stays if
the smaller case fails in the same way. Rounds of steps go on until none stays. That is delta
debugging on a record instead of on text, and as each case is valid, no step is wasted.

The results of a campaign in a few lines.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mstpass.fuzz.case import CALL, Case
from mstpass.fuzz.checks import FAST
from mstpass.fuzz.plans import Failure
from mstpass.fuzz.render import source

Result = dict[str, Any]  # of a case, in a campaign
Fails = Callable[[Case], bool]


def reduce(case: Case, fails: Fails, budget: int = 400) -> Case:
    """The smallest case found that still fails, after at most ``budget`` runs of ``fails``."""
    tried: set[Case] = {case}
    while True:
        for smaller in smaller_cases(case):
            if smaller in tried:
                continue
            if len(tried) > budget:
                return case
            tried.add(smaller)
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def smaller_cases(record: Any) -> Iterator[Any]:
    """The same case with one thing less, the largest cuts first."""
    fields = dataclasses.fields(record)
    order = sorted(fields, key=lambda field: "records" not in field.metadata)
    for field in order:
        for value in _smaller_values(field, getattr(record, field.name)):
            yield dataclasses.replace(record, **{field.name: value})


def _smaller_values(field: dataclasses.Field[Any], value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) and "values" not in field.metadata:
        for position in range(len(value)):
            yield value[:position] + value[position + 1 :]
        if "records" in field.metadata:
            for position, item in enumerate(value):
                for smaller in smaller_cases(item):
                    yield (*value[:position], smaller, *value[position + 1 :])
    elif "values" in field.metadata:
        values = field.metadata["values"]
        yield from itertools.takewhile(lambda plainer: plainer != value, values)


# ---- tests --------------------------------------------------------------------------------------
def as_test(case: Case, kind: str, failures: Sequence[Failure]) -> str:
    """The text of a test that fails as the case does."""
    given = [f"{name}={value!r}" for name, value in case.other_than_plain(CALL).items()]
    arguments = ", ".join(["Model", "inputs", *([] if kind == FAST else [repr(kind)]), *given])
    imports, body = _parts(source(case))
    said = "".join(f"    # {failure}\n" for failure in failures)
    return (
        f"{imports}from mstpass.fuzz.checks import hold\n\n\n"
        f"def test_a_case_of_the_fuzzer():\n{said}"
        f"{textwrap.indent(body, '    ')}\n    hold({arguments})\n"
    )


def _parts(text: str) -> tuple[str, str]:
    """The imports, and the rest with no more than one empty line in a row."""
    start = re.search(r"^(class|def) ", text, re.MULTILINE)
    assert start is not None, "the start is known"
    head, rest = text[: start.start()], text[start.start() :]
    return re.sub(r"\n\n+", "\n", head), re.sub(r"\n\n\n+", "\n\n", rest).strip()


def signature(failure: Failure) -> str:
    """What stays of a failure while its case shrinks, and what tells it from other failures."""
    if failure.kind != "crash":
        return failure.kind
    return "".join(c for c in f"{failure.kind}: {failure.text}" if not c.isdigit())


# ---- summary -------------------------------------------------------------------------------------
_LARGE_BYTES = 2**18  # of smaller steps, what else allocates memory is a part
_NEAR = 0.03


def distinct_failures(results: Iterable[Result]) -> dict[str, list[int]]:
    """The numbers of the cases that fail in each way."""
    found: dict[str, list[int]] = defaultdict(list)
    for result in results:
        for way in {signature(Failure(**failure)) for failure in result.get("failures", ())}:
            found[way].append(result["number"])
    return dict(found)


def summary_lines(results: Iterable[Result]) -> Iterator[str]:
    results = list(results)
    statuses = Counter(result["status"] for result in results)
    facts: Counter[str] = Counter()
    for result in results:
        facts.update(result.get("facts", {}))
    seconds = sum(result.get("seconds", 0.0) for result in results)
    yield f"{len(results)} cases in {seconds:.0f} s: " + _counts(statuses)
    if facts:
        yield "what the plans did: " + _counts(facts)
    yield from _peak_lines(results)
    for name in ("invalid", "torch fails"):
        reasons = Counter(r["reason"][:80] for r in results if r["status"] == name)
        for reason, number in reasons.most_common(3):
            yield f"  {name}, {number} times: {reason}"
    for way, numbers in distinct_failures(results).items():
        few = ", ".join(map(str, sorted(numbers)[:8]))
        yield f"FAILED {way}: {len(numbers)} cases, such as {few}"


def _peak_lines(results: Iterable[Result]) -> Iterator[str]:
    """How far simulated and scheduled peaks are from the measured ones, where they say anything."""
    peaks = [r["peaks"] for r in results if r.get("peaks") and r["peaks"][2] >= _LARGE_BYTES]
    for position, name in enumerate(("simulated", "scheduled")):
        ratios = sorted(peak[position] / peak[2] for peak in peaks)
        if ratios:
            near = sum(abs(ratio - 1) <= _NEAR for ratio in ratios)
            yield (
                f"{name} peak within {_NEAR:.0%} of the measured: {near} of {len(ratios)} "
                f"(ratios from {ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())
