"""The folder with PyTorch's tests: a given one, or that of the installed version's release."""

from __future__ import annotations

import tarfile
import urllib.request
from pathlib import Path

import torch

_RELEASE = "https://codeload.github.com/pytorch/pytorch/tar.gz/refs/tags/v{version}"
_CACHE = Path("~/.cache/mstpass/torch-tests").expanduser()


def test_folder(source: str | None) -> Path:
    """The folder ``test`` of PyTorch's sources.

    Args:
        source: a checkout, or its folder ``test``; None downloads the release once.

    Raises:
        FileNotFoundError: the source has no such folder.
        OSError: there is no network.
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
        partial = root.with_suffix(".partial")
        with (
            urllib.request.urlopen(url) as answer,
            tarfile.open(fileobj=answer, mode="r|gz") as tar,
        ):
            for member in tar:
                inside = member.name.partition("/")[2]  # without the folder pytorch-<version>
                if inside.startswith("test/"):
                    tar.extract(member.replace(name=inside), partial, filter="data")
        partial.rename(root)
    return root
