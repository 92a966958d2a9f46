"""A report's advice helps: followed, the step is no longer refused for that reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mstpass
from mstpass.plans import Rejection
from mstpass.report.report import Report

from .advice_cases import CASES

pytestmark = [pytest.mark.sampled(8), pytest.mark.op_by_op]


@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_followed_helps(name: str) -> None:
    case = CASES[name]
    before = _explain(case.refused, case.options)
    found = _rejections(before, case.reason)
    assert found and all(case.advice in rejection.fix for rejection in found), before
    after = _explain(case.followed, {**case.options, **case.changed})
    assert not _rejections(after, case.reason), after
    assert len(after.regions) > len(before.regions) or after.peak_bytes < before.peak_bytes


def _explain(fn: Callable[..., Any], options: dict[str, Any]) -> Report:
    return mstpass.explain(fn, *(fn.__defaults__ or ()), options=options)


def _rejections(report: Report, reason: str) -> list[Rejection]:
    return [rejection for rejection in report.rejections if reason in rejection.reason]
