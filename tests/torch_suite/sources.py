"""The folder with PyTorch's tests: a given one, or that of the installed version's release."""

from __future__ import annotations

import tarfile
import tempfile
import urllib.request
from pathlib import Path

import torch

_RELEASE = "https://codeload.github.com/pytorch/pytorch/tar.gz/refs/tags/v{version}"
_SILENCE_S = 60  # after which a download has failed
_CACHE = Path("~/.cache/mstpass/torch-tests").expanduser()


class DownloadError(Exception):
    """The tests of the installed version cannot be downloaded."""


def test_folder(source: str | None) -> Path:
    """The folder ``test`` of PyTorch's sources.

    Args:
        source: a checkout, or its folder ``test``; None downloads the release once.

    Raises:
        FileNotFoundError: the source has no such folder.
        DownloadError: the release cannot be had.
    """
    root = _downloaded() if source is None else Path(source).expanduser().resolve()
    for folder in (root / "test", root):
        if (folder / "functorch").is_dir():
            return folder
    raise FileNotFoundError(f"{root} is no checkout of PyTorch: it has no test/functorch")


def _downloaded() -> Path:
    version = torch.__version__.partition("+")[0]
    root = _CACHE / f"v{version}"
    if not root.exists():
        url = _RELEASE.format(version=version)
        try:
            _extract_tests(url, root)
        except (OSError, tarfile.TarError) as error:
            raise DownloadError(
                f"cannot download the tests of torch {version} from {url}: {error}. "
                "Give the path of a checkout of that version with --source"
            ) from error
    return root


def _extract_tests(url: str, root: Path) -> None:
    """The folder ``test`` of a release; ``root`` does not exist before it is complete."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as partial:
        with (
            urllib.request.urlopen(url, timeout=_SILENCE_S) as answer,
            tarfile.open(fileobj=answer, mode="r|gz") as tar,
        ):
            for member in tar:
                inside = member.name.partition("/")[2]  # without the folder pytorch-<version>
                if inside.startswith("test/"):
                    tar.extract(member.replace(name=inside), partial, filter="data")
        Path(partial, "test").rename(root)
