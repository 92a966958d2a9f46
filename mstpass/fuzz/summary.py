"""The results of a campaign in a few lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from mstpass.fuzz.campaign import Result
from mstpass.fuzz.plans import Failure
from mstpass.fuzz.worker import signature

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
