"""The results of a campaign in a few lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from mstpass.fuzz.campaign import Result
from mstpass.fuzz.checks import Failure
from mstpass.fuzz.worker import signature


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
    for name in ("invalid", "torch fails"):
        reasons = Counter(r["reason"][:80] for r in results if r["status"] == name)
        for reason, number in reasons.most_common(3):
            yield f"  {name}, {number} times: {reason}"
    for way, numbers in distinct_failures(results).items():
        few = ", ".join(map(str, sorted(numbers)[:8]))
        yield f"FAILED {way}: {len(numbers)} cases, such as {few}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())
