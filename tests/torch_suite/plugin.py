"""A pytest plugin that runs inside of one process of the suite.

It writes one line of JSON when a test starts and one with its outcome. A test that runs too long
fails. Tests whose outcome is known already are left out, so a later call goes on.

PyTorch's tests may be newer or older than the installed torch. A name that a test file imports and
that torch does not have is replaced by a ``Missing``: tests that use it are skipped, and the reason
names it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
import time
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.torch_suite.on_cpu import import_on_cpu

VARIABLE = "MSTPASS_TORCH_SUITE"  # the path of the settings, a file of JSON
_MOST_MISSING = 40  # of one import statement


class TestTimeoutError(BaseException):
    """Not an ``Exception``: Dynamo turns those into graph breaks."""


class Missing:
    """Stands for a name that the installed torch lacks."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):  # used as a decorator
            return unittest.skip(f"torch has no {self.name}")(args[0])
        return Missing(self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __enter__(self) -> Any:
        raise unittest.SkipTest(f"torch has no {self.name}")

    def __exit__(self, *args: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Suite:
    def __init__(self, settings: dict[str, Any]):
        self.results, self.limit_s = Path(settings["results"]), settings["limit_s"]
        self.backend, self.file = settings["backend"], settings["file"]
        self.done = frozenset(settings["done"])
        self.only = frozenset(settings["only"]) if settings["only"] is not None else None
        self.most, self.on_cpu = settings["most"], settings["on_cpu"]
        self.calls: Any = None
        if self.backend == "mst":
            from tests.torch_suite.rename import Calls, rename

            self.calls = Calls()
            rename(self.calls)

    def write(self, **fields: Any) -> None:
        line = json.dumps({"file": self.file, "backend": self.backend, **fields})
        with self.results.open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    # ---- collecting ----------------------------------------------------------------------------
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path) -> None:
        """pytest imports the file next."""
        sys.path.insert(0, str(module_path.parent))
        _supply_missing_names(module_path)
        if self.on_cpu:
            import_on_cpu(module_path)

    @pytest.hookimpl(trylast=True)  # -k comes first
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {name_of(item): item for item in items}
        self.write(collected=len(names))
        left = [
            item
            for name, item in names.items()
            if name not in self.done and (self.only is None or name in self.only)
        ]
        items[:] = left[: self.most]

    # ---- running -------------------------------------------------------------------------------
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.write(start=name_of(item))
        before = self.calls.count if self.calls else 0
        started = time.monotonic()
        outcome: dict[str, Any] = {"outcome": "passed", "reason": ""}
        item.stash[_OUTCOME] = outcome
        signal.signal(signal.SIGALRM, self._too_long)
        signal.alarm(self.limit_s)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            seconds = round(time.monotonic() - started, 1)
            calls = self.calls.count - before if self.calls else 0
            self.write(test=name_of(item), seconds=seconds, calls=calls, **outcome)

    def _too_long(self, *_: object) -> None:
        raise TestTimeoutError(f"took longer than {self.limit_s} s")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report: Any = yield
        outcome = item.stash[_OUTCOME]
        if report.skipped:
            xfailed = hasattr(report, "wasxfail")
            outcome["outcome"] = "passed" if xfailed else "skipped"
            outcome["reason"] = str(call.excinfo.value)[:300] if call.excinfo else ""
        elif report.failed and outcome["outcome"] != "failed":
            text = str(report.longrepr)
            error = call.excinfo.value if call.excinfo else None
            reason = f"{type(error).__name__}: {error}" if error is not None else text
            outcome.update(outcome="failed", reason=reason[:1500], trace=text[-4000:])
        return report


_OUTCOME = pytest.StashKey[dict[str, Any]]()


def name_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def _supply_missing_names(path: Path) -> None:
    """Run the file's imports, and give torch a ``Missing`` for each name that it does not have."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        code = compile(ast.Module([node], []), str(path), "exec")
        for _ in range(_MOST_MISSING):
            try:
                exec(code, {"__name__": path.stem})
            except ImportError as error:
                if _supply(error):
                    continue
            except Exception:
                pass  # pytest will report it
            break


def _supply(error: ImportError) -> bool:
    """Give torch the name whose import failed. Returns whether that was possible."""
    match = re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    if match is not None:
        name, module = match.groups()
        setattr(sys.modules[module], name, Missing(f"{module}.{name}"))
        return True
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = types.ModuleType(error.name)
        module.__getattr__ = lambda name: _attribute(module, name)  # type: ignore[method-assign]
        module.__path__ = []
        sys.modules[error.name] = module
        return True
    return False


def _attribute(module: types.ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{module.__name__}.{name}")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(VARIABLE)
    if path is not None:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        config.pluginmanager.register(Suite(settings))
