"""Which rejections ask the user for a change, and which do not.

A rejection asks for nothing if its advice is to change nothing; if the part is too small to matter
for the peak of the step; or if it is small, and only its number of tokens is too small, while other
parts of the same step run in chunks. Pages and texts sum these up; the data have them whole.
"""

from __future__ import annotations

from mstpass.plans import Rejection
from mstpass.regions.advice import asks_for_nothing, wants_more_tokens
from mstpass.report.data import ReportData

LEAST_PEAK_SHARE = 0.01  # what is below this share of the peak is not worth a line of its own
_SMALL = 0.05  # of the peak


def asks_for_change(rejection: Rejection, report: ReportData) -> bool:
    """Whether the user can do something about this rejection of the report that may help."""
    if asks_for_nothing(rejection):
        return False
    is_few = report.regions and wants_more_tokens(rejection)
    least = _SMALL if is_few else LEAST_PEAK_SHARE
    return not 0 < rejection.bytes <= least * (report.outcome.peak_bytes or 0)
