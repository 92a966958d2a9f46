"""One process that runs cases, one after the other.

It gets requests, ``("check", number)`` or ``("reduce", number)``, and answers each with a result. A
case that ends the process, or never ends, ends only this one; campaign.py starts another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
from multiprocessing.connection import Connection
from typing import Any

import torch

from mstpass.frame_stack import with_deep_stack
from mstpass.fuzz.case import Case, draw
from mstpass.fuzz.checks import Checked, check_case
from mstpass.fuzz.plans import Failure
from mstpass.fuzz.reduce import as_test, reduce, signature
from mstpass.problem.problem_json import encoded

_NEW_OBJECTS = 50_000  # that Python's garbage collector waits for; a case makes millions


def serve(requests: Connection, kind: str, seed: int, scratch: str) -> None:
    """Answer requests until there are no more; what cases write goes to the folder ``scratch``."""
    os.setsid()  # an interrupt is the campaign's to handle
    os.chdir(scratch)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # what a case prints is no answer
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()  # what torch holds is not looked through at every collection
    gc.set_threshold(_NEW_OBJECTS, 20, 50)
    with contextlib.suppress(EOFError):
        while True:
            command, number = requests.recv()
            run = {"check": _check, "reduce": _reduce}[command]
            answer = with_deep_stack(run, draw(seed, number), kind)
            requests.send({"number": number, **answer})


def _check(case: Case, kind: str) -> dict[str, Any]:
    """What became of a case; one that failed is kept, as a changed generator draws others."""
    try:
        checked = check_case(case, kind)
    except Exception as error:
        failure = Failure("crash", f"{type(error).__name__}: {error}"[:300])
        checked = Checked("failed", (failure,))
    answer = dataclasses.asdict(checked)
    return {**answer, "case": encoded(case)} if checked.failures else answer


def _reduce(case: Case, kind: str) -> dict[str, Any]:
    """The smallest case that fails as the case does, and the test that it makes."""
    sought = {signature(failure) for failure in check_case(case, kind).failures}

    def fails(smaller: Case) -> bool:
        return any(signature(f) in sought for f in check_case(smaller, kind).failures)

    smallest = reduce(case, fails)
    checked: Checked = check_case(smallest, kind)
    return {"case": encoded(smallest), "test": as_test(smallest, kind, checked.failures)}
