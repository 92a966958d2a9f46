"""A failing case as a test: its source, and one call of ``hold``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from mstpass.fuzz.case import Case
from mstpass.fuzz.checks import FAST, Failure
from mstpass.fuzz.program import Setup
from mstpass.fuzz.render import source


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
    assert start is not None
    head, rest = text[: start.start()], text[start.start() :]
    return re.sub(r"\n\n+", "\n", head), re.sub(r"\n\n\n+", "\n\n", rest).strip()
