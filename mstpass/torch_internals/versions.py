"""The versions of torch that mstpass was checked on, for every file of this package.

A version is here once all probes and the tests of hooks have passed on it; docs/versions.md says
what else has been run.
"""

from __future__ import annotations

import functools
import re
import warnings

CHECKED = ("2.11", "2.12", "2.13", "2.14", "2.15")
ADVICE = (
    "`python -m mstpass.torch_internals` runs all checks of the installed torch and names what it "
    "lacks"
)


class UncheckedTorchWarning(UserWarning):
    """The installed torch is newer than any that mstpass was checked on."""


def is_newer(version: str) -> bool:
    """Whether a version of torch is a later release than any that was checked."""
    return _release(version) > max(map(_release, CHECKED))


@functools.cache
def warn_if_newer(version: str) -> None:
    """Warn of a torch that is newer than any that was checked; once in a process."""
    if is_newer(version):
        warnings.warn(
            f"mstpass was checked with torch {CHECKED[0]} to {CHECKED[-1]}, and this is torch "
            f"{version}. Each graph is checked while it compiles; one in which this torch left out "
            f"a part of mstpass is compiled by Inductor alone, and you are told. {ADVICE}.",
            UncheckedTorchWarning,
            stacklevel=3,
        )


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number, also of "2.16.0a0+git1234"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
