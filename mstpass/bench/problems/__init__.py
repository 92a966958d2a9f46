"""Recorded partition problems of real models, as `mstpass bench record` writes them."""

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
    """Read a recorded problem. This imports no torch.

    Raises:
        UserError: there is no problem of that name.
    """
    if name not in names():
        raise UserError(f"problem {name!r} is unknown; choose from: {', '.join(names())}")
    return CutProblem.from_json(path_of(name))


def path_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{name}{_SUFFIX}"
