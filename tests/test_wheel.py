"""A wheel built from the checkout, beside torch alone, runs the README's first example."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import setuptools

import mstpass

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIG = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
_DEPENDENCIES = re.search(r"^dependencies = (.*)$", CONFIG, re.MULTILINE)[1]
DATA = {"py.typed", "planner/models.json", "bench/problems/head.json.gz"}
FOLDERS_OF_DATA = ("torch_internals/*.cpp", "report/viewer/*", "bench/problems/*.json.gz")
# Hides the packages that the wheel does not ask for, and runs a program.
_ALONE = """
import importlib.util, runpy, sys
from importlib.abc import MetaPathFinder

HIDDEN = set(sys.argv.pop(1).split(","))

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def find_spec(name, package=None):
    return None if name.partition(".")[0] in HIDDEN else found(name, package)

sys.meta_path.insert(0, Hidden())
found, importlib.util.find_spec = importlib.util.find_spec, find_spec
import mstpass
assert "site" in mstpass.__file__, mstpass.__file__
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _hidden() -> set[str]:
    """The modules of all packages but those that the wheel needs, and that these need."""
    names = re.findall(r'"([\w-]+)[><=]', _DEPENDENCIES)
    known: set[str] = set()
    while names:
        name = re.split(r"[^\w.-]", names.pop())[0].lower().replace("-", "_")
        if name not in known:
            known.add(name)
            with contextlib.suppress(PackageNotFoundError):  # of another platform
                names += [other for other in requires(name) or () if "extra ==" not in other]
    if "setuptools" in known:  # it has copies of its own, and prefers others
        copies = Path(str(setuptools.__file__)).parent / "_vendor"
        known |= {path.name.partition("-")[0].lower() for path in copies.glob("*.dist-info")}
    return {
        module
        for module, packages in packages_distributions().items()
        if not {name.lower().replace("-", "_") for name in packages} & known
    }


def _python(code: list[str], cwd: Path, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel that was built and installed without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # the build writes into it
    subprocess.run(["cp", "-r", "--", *_sources(), str(_made(source))], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    quiet = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "install", *quiet, "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return folder


def _sources() -> list[str]:
    return [str(ROOT / name) for name in ("mstpass", "pyproject.toml", "README.md", "LICENSE")]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _alone(installed: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing to import but the wheel, and what it says that it needs."""
    hidden = _hidden() - {"mstpass"}
    assert {"transformers", "rich", "matplotlib", "pytest"} <= hidden and "torch" not in hidden
    (installed / "program.py").write_text(code)
    (installed / "alone.py").write_text(_ALONE)
    argv = ["alone.py", ",".join(sorted(hidden)), "program.py"]
    # not that of setuptools, which torch does not need everywhere
    return _python(argv, installed, installed / "site", SETUPTOOLS_USE_DISTUTILS="stdlib")


def test_the_wheel_has_all_files_of_the_package(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    assert f"-{mstpass.__version__}-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    package = ROOT / "mstpass"
    files = [*package.rglob("*.py"), *(f for p in FOLDERS_OF_DATA for f in package.glob(p))]
    expected = DATA | {str(path.relative_to(package)) for path in files if path.is_file()}
    assert len(expected) > 200
    assert not {f"mstpass/{name}" for name in expected} - set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


def test_the_first_example_of_the_readme(installed: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert block is not None and 'backend="mst"' in block[1]
    shown = (
        "\nimport mstpass, sys\nprint(mstpass.reports()[-1])\nassert 'rich' not in sys.modules\n"
    )
    done = _alone(installed, block[1] + shown)
    assert done.returncode == 0, done.stderr
    assert "lm_head  fused" in done.stdout


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--help"], 0, "explain"),
        (["--version"], 0, mstpass.__version__),
        (["explain", "program.py:step"], 0, "lm_head"),
        (["demo", "--quick"], 1, "pip install 'mstpass["),
    ],
)
def test_commands_without_further_packages(
    argv: list[str], code: int, said: str, installed: Path
) -> None:
    program = f"""
import sys
import torch
import torch.nn.functional as F

head = torch.nn.Linear(64, 4096, bias=False)

def step():
    return F.cross_entropy(head(torch.randn(2048, 64)), torch.zeros(2048).long())

if __name__ == "__main__":
    from mstpass.cli.main import main
    sys.exit(main({argv!r}))
"""
    done = _alone(installed, program)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_versions_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.*?)\] - (\S+)$", changelog, re.MULTILINE)
    released = [version for version, date in versions if date != "unreleased"]
    assert mstpass.__version__ == re.search(r'^version = "(.*)"$', CONFIG, re.M)[1] == released[0]
    assert [date for _, date in versions[1:] if date == "unreleased"] == []
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in versions[1:])
