"""Shrink a failing case to the plainest case that fails in the same way, and make it a test.

Every field of a case lists its values, the plainest first (case.py). A case is made smaller by one
step at a time: a layer or an item less, or a field at an earlier value of its list. A step stays if
the smaller case fails in the same way. Rounds of steps go on until none stays. That is delta
debugging on a record instead of on text, and as each case is valid, no step is wasted.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mstpass.fuzz.case import Case
from mstpass.fuzz.checks import FAST
from mstpass.fuzz.plans import Failure
from mstpass.fuzz.program import Setup
from mstpass.fuzz.render import source

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
    plain, setup = vars(Setup()), vars(Setup.of(case))
    given = [f"{name}={value!r}" for name, value in setup.items() if value != plain[name]]
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
