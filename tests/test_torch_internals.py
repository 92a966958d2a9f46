"""The private APIs that mstpass uses are in the installed torch, and do what is expected."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config

import mstpass
from mstpass.backend import mst
from mstpass.torch_internals import __main__ as runner
from mstpass.torch_internals import dynamo
from mstpass.torch_internals.probes import PROBES, Probe
from mstpass.torch_internals.settings import SharedPatch, backward_compiled_at_once
from mstpass.torch_internals.versions import (
    CHECKED,
    TorchChangedError,
    UncheckedTorchWarning,
    find,
    find_or_none,
    has_release,
    is_newer,
    warn_if_newer,
)
from tests.source_files import FILES, ROOT, name_of, parsed
from tests.torch_probes import of_frontend, of_graphs, of_inductor

CHECKS = {**vars(of_graphs), **vars(of_frontend), **vars(of_inductor)}


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_installed_torch_has(probe: Probe) -> None:
    probe.require()
    if check := CHECKS.get(probe.name):
        check(importlib.import_module(f"mstpass.torch_internals.{probe.adapter}"))


def test_a_probe_says_all() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES) > 40
    for probe in PROBES:
        assert probe.purpose and probe.apis and probe.lost


@pytest.mark.parametrize(
    ("api", "message"),
    [
        ("torch._nowhere.compile", "torch._nowhere.compile is missing"),
        ("torch._ops.Nothing", "torch._ops.Nothing is missing"),
        ("torch._ops.HigherOrderOperator(name, colour)", "has no parameter colour"),
        ("torch._ops.One | torch._ops.Two", "torch._ops.One is missing; torch._ops.Two is missing"),
    ],
)
def test_what_is_missing_is_named_with_the_versions_checked(api: str, message: str) -> None:
    with pytest.raises(TorchChangedError, match=message.replace(".", r"\.")) as error:
        find(api)
    assert find_or_none(api) is None
    assert f"checked with torch {', '.join(CHECKED)}" in str(error.value)


def test_the_installed_torch_was_checked() -> None:
    """A newer one warns: once all probes and tests have passed on it, add it to CHECKED."""
    assert not is_newer(torch.__version__)
    assert ".".join(torch.__version__.split(".")[:2]) in CHECKED


@pytest.mark.parametrize(
    ("version", "release", "has"),
    [
        ("2.15.0a0+git12", "2.15", True),
        ("2.14.1+cpu", "2.15", False),
        ("2.100.0", "2.15", True),
        ("3.0.0", "2.15", True),
    ],
)
def test_releases_are_numbers(
    version: str, release: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert has_release(release) == has


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.11.0", False),
        ("2.15.3+cpu", False),
        ("2.16.0a0+git12", True),
        ("2.100.1", True),
        ("3.0.0", True),
    ],
)
def test_a_newer_torch_warns_once(version: str, newer: bool) -> None:
    assert is_newer(version) == newer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_newer(version)
        warn_if_newer(version)
    texts = [str(w.message) for w in caught if w.category is UncheckedTorchWarning]
    assert len(texts) == newer
    assert all(f"{CHECKED[0]} to {CHECKED[-1]}, and this is torch {version}" in t for t in texts)


def test_the_backend_warns_of_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0.test")
    step = torch.compile(lambda x: x.sin(), backend=mst)
    with pytest.warns(UncheckedTorchWarning, match=r"this is torch 9\.9\.0\.test"):
        step(torch.ones(2))


def test_one_of_several_names_is_enough() -> None:
    assert find("torch._ops.Nothing | torch._ops.OpOverload") is torch._ops.OpOverload


def test_the_runner_fails_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PROBES", [p for p in PROBES if p.name == "op_types"])
    assert runner.main() == 0
    assert "op_types: ok" in capsys.readouterr().out
    monkeypatch.delattr("torch._ops.OpOverload")
    assert runner.main() == 1
    told = capsys.readouterr().out
    assert "op_types: TorchChangedError: torch" in told and "Lost without graphs.py: loops" in told


def test_the_trial_fails_loudly(capsys: pytest.CaptureFixture[str]) -> None:
    """`make test-versions` runs it with loops, on every torch."""
    assert runner.trial("eager") == 0
    assert "gradients are eager's to within 0.0" in capsys.readouterr().out
    wrong = lambda gm, _: lambda *args: [2 * value for value in gm(*args)]
    torch.compiler.reset()
    assert runner.trial(wrong) == 1
    torch.compiler.reset()
    assert runner.trial(lambda gm, _: 1 / 0) == 1  # type: ignore[arg-type]
    assert "division by zero" in capsys.readouterr().out


def test_lint_says_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.autograd.graph._engine_run_backward")
    dynamo._kinds.cache_clear()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TorchChangedError, match=r"torch\.autograd\.graph\._engine_run_backward is"):
        mstpass.lint(lambda: x.sin().sum())


def test_threads_share_a_patch() -> None:
    """The thread that is done first leaves the patch to the other; the last one undoes it."""
    made: list[str] = []

    @contextlib.contextmanager
    def make() -> Iterator[None]:
        made.append("made")
        yield
        made.append("undone")

    patch = SharedPatch(make)
    entered, left = threading.Barrier(2), threading.Event()
    seen: list[list[str]] = []

    def first() -> None:
        with patch():
            entered.wait()
        left.set()

    def second() -> None:
        with patch():
            entered.wait()
            left.wait()
            seen.append(list(made))

    run_together(first, second)
    assert seen == [["made"]]
    assert made == ["made", "undone"] and not patch.is_made


def test_a_forked_process_has_the_patches_of_its_thread_alone() -> None:
    """The thread that needs the patch, and holds its lock, is not there."""
    made: list[str] = []

    @contextlib.contextmanager
    def make() -> Iterator[None]:
        made.append("made")
        yield
        made.append("undone")

    patch = SharedPatch(make)
    entered, forked = threading.Event(), threading.Event()

    def other() -> None:
        with patch():
            entered.set()
            forked.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    with patch._lock:
        child = os.fork()
        if not child:
            with patch():
                inside = patch.is_made
            os._exit(0 if inside and made == ["made", "undone"] * 2 else 1)
    forked.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert made == ["made", "undone"]


def test_threads_patch_settings_for_themselves() -> None:
    before = functorch_config.force_non_lazy_backward_lowering
    entered, left = threading.Barrier(2), threading.Event()
    seen: list[bool] = []

    def first() -> None:
        with backward_compiled_at_once():
            entered.wait()
        left.set()

    def second() -> None:
        with backward_compiled_at_once():
            entered.wait()
            left.wait()
            seen.append(functorch_config.force_non_lazy_backward_lowering)

    run_together(first, second)
    assert seen == [True]
    assert functorch_config.force_non_lazy_backward_lowering == before


def run_together(*functions: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result(timeout=60)


# ---- no private API of torch outside of its home ------------------------------------------------
_HOME = ROOT / "torch_internals"
_FILES = [path for path in FILES if _HOME not in path.parents]
# not torch's: a named tuple's method, the interpreter's frame, whether an import is under way, the
# names of an enum's own protocol, and what transformers and TRL have
_OTHERS = {
    *("_replace", "_getframe", "_initializing", "_name_", "_value_", "_missing_"),
    *(
        "_attn_implementation",
        "_can_set_attn_implementation",
        "_prepare_inputs",
        "_entropy_bonus_enabled",
        "_tp_size",
    ),
}
_OPS = ("aten", "prims", "torch.ops.aten")  # ops, some of whose names begin with an underscore


def test_private_apis_are_used_in_their_homes_alone() -> None:
    names = ((path, *found) for path in _FILES for found in _private_names(parsed(path)))
    found = [f"{name_of(path)}:{node.lineno} {name}" for path, node, name in names if name]
    assert not found, "move it to mstpass/torch_internals"


def test_private_apis_are_found() -> None:
    tree = ast.parse(
        "import torch._a\nimport torch.b._c as c\nfrom torch._d import e\nfrom torch.f import _g\n"
        "from torch.h._i import j\ntorch._k.l\nx._m.n\ngetattr(x, '_o')\n"
        "from torch import fx\nself._p\naten._q.default\ngetattr(x, 'r')\nx.__s__\n"
    )
    found = [node.lineno for node, name in _private_names(tree) if name]
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7, 8]


def _private_names(tree: ast.AST) -> Iterator[tuple[Any, str]]:
    """Nodes of a file's syntax tree, with the private name of torch that each uses, if any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            own = owner in ("self", "cls", *_OPS) or node.attr in _OTHERS
            yield node, node.attr if _is_private(node.attr) and not own else ""
            continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _BY_NAME:
            constants = (str(a.value) for a in node.args if isinstance(a, ast.Constant))
            yield node, next((c for c in constants if _is_private(c) and c not in _OTHERS), "")
            continue
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield node, name if parts[0] == "torch" and any(map(_is_private, parts)) else ""


def test_versions_of_torch_are_asked_for_in_one_place() -> None:
    """Support for a new torch touches mstpass/torch_internals alone."""
    found = [f"{name_of(p)}:{node.lineno}" for p in _FILES for node in _versions(parsed(p))]
    assert not found, "ask mstpass/torch_internals/versions.py"


def test_questions_for_versions_are_found() -> None:
    source = "torch.__version__\nVERSION = '2.15'\nhasattr(torch.nn, 'A')\ngetattr(F, 'a', None)\n"
    kept = "getattr(torch, name)\nself.__version__ = '0.2.0'\ngetattr(gm, 'a', None)\n"
    assert [node.lineno for node in _versions(ast.parse(source + kept))] == [1, 2, 3, 4]


def _versions(tree: ast.AST) -> Iterator[Any]:
    """Nodes that name a version of torch, or ask whether torch has something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Constant):
            if re.fullmatch(r"torch\.__version__|'2\.1\d'", ast.unparse(node)):
                yield node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            owner, name = node.args[:2]
            of_torch = re.match(r"(torch|F|nn|aten|fx)\b", ast.unparse(owner))
            if of_torch and isinstance(name, ast.Constant):
                yield node


_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_the_probes_of_a_file_list_what_it_imports() -> None:
    imported = [
        (path, f"{node.module}.{alias.name}")
        for path in _HOME.glob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and _is_private_path(str(node.module))
        for alias in node.names
    ]
    assert len(imported) > 100
    listed = {path: " ".join(_apis_of(path)) for path, _ in imported}
    assert not [f"{name_of(path)}: {name}" for path, name in imported if name not in listed[path]]


def _apis_of(adapter: Path) -> list[str]:
    return [api for probe in PROBES if probe.adapter == adapter.stem for api in probe.apis]


def _is_private_path(module: str) -> bool:
    return module.startswith("torch.") and any(map(_is_private, module.split(".")))
