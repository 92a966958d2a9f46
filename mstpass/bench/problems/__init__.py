"""Recorded partition problems of real models: what `mstpass bench record` wrote, without torch."""

from __future__ import annotations

from pathlib import Path

from mstpass.errors import UserError
from mstpass.problem.problem import CutProblem

FOLDER = Path(__file__).parent
_SUFFIX = ".json.gz"


def names() -> list[str]:
    """The recorded problems, the smallest first."""
    files = sorted(FOLDER.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_size)
    return [path.name.removesuffix(_SUFFIX) for path in files]


def load(name: str) -> CutProblem:
    """One of them.

    Raises:
        UserError: there is none of that name.
    """
    if name not in names():
        raise UserError(f"no recorded problem {name!r}, only {', '.join(names())}")
    return CutProblem.from_json(path_of(name))


def path_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{name}{_SUFFIX}"
