"""The backend's name in Accelerate, and the hook that waits for its import."""

import copy
import enum
import importlib.metadata
import importlib.util
import logging
import pickle
import subprocess
import sys
import types

import pytest

from mstpass.integrations import accelerate_backends
from mstpass.integrations.after_import import after_import

ENTRY = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "mstpass"]


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment or None
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_a_function_is_called_after_an_import(tmp_path, monkeypatch):
    (tmp_path / "mst_some_module.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    after_import("mst_some_module", lambda module: seen.append(module.x))
    assert importlib.util.find_spec("mst_some_module") is not None  # that is no import yet
    assert seen == []
    import mst_some_module

    assert seen == [1]
    assert mst_some_module.__loader__ is mst_some_module.__spec__.loader
    assert type(mst_some_module.__loader__).__name__ == "SourceFileLoader"
    after_import("mst_some_module", lambda module: seen.append(2))
    assert seen == [1, 2]
    monkeypatch.delitem(sys.modules, "mst_some_module")


def test_a_module_that_is_not_there_stays_missing():
    after_import("mst_no_such_module", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        import mst_no_such_module  # noqa: F401


def test_mstpass_imports_no_library():
    out = python(
        "import mstpass, sys; print(*(n in sys.modules for n in ('accelerate', 'torch', 'trl')))"
    )
    assert out == ["False"] * 3


@pytest.mark.parametrize(
    "module",
    [
        types.SimpleNamespace(),
        types.SimpleNamespace(DynamoBackend=("INDUCTOR",)),
        types.SimpleNamespace(DynamoBackend=enum.Enum("DynamoBackend", {"INDUCTOR": "INDUCTOR"})),
        types.SimpleNamespace(DynamoBackend=enum.StrEnum("DynamoBackend", {"INDUCTOR": "inductor"}))
        if sys.version_info >= (3, 11)
        else types.SimpleNamespace(DynamoBackend={}),
    ],
)
def test_an_unknown_accelerate_is_left_alone(module, caplog):
    before = copy.copy(vars(module))
    with caplog.at_level(logging.WARNING):
        accelerate_backends._add_to_enum(module)
        accelerate_backends._add_to_command_line(module)
    assert vars(module) == before
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        for word in (
            "accelerate",
            "1.1 to 1.15",
            "torch_compile_backend",
            "mstpass.compile(model)",
        ):
            assert word in message


class Backends(str, enum.Enum):
    INDUCTOR = "INDUCTOR"
    MST = "MST"


def test_an_accelerate_that_has_the_name_stays_as_it_is():
    module = types.SimpleNamespace(DynamoBackend=Backends, DYNAMO_BACKENDS=["INDUCTOR", "MST"])
    accelerate_backends._add_to_enum(module)
    accelerate_backends._add_to_command_line(module)
    assert Backends._missing_.__func__ is enum.Enum._missing_.__func__
    assert module.DYNAMO_BACKENDS == ["INDUCTOR", "MST"]


def test_accelerate_knows_the_name():
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="mst")
    assert plugin.to_kwargs() == {"backend": "mst"}
    assert plugin.backend is DynamoBackend.MST is DynamoBackend("MST")
    assert plugin.backend == "MST" and plugin.backend != DynamoBackend.NO
    assert isinstance(plugin.backend, DynamoBackend) and "MST" in DynamoBackend
    assert pickle.loads(pickle.dumps(plugin.backend)) is plugin.backend
    assert copy.deepcopy(plugin.backend) is plugin.backend
    with pytest.raises(ValueError, match="MTS"):
        DynamoBackend("MTS")
    launched = launch_command_parser().parse_args(["--dynamo_backend", "mst", "train.py"])
    assert launched.dynamo_backend == "mst"


USE = "from accelerate.utils import TorchDynamoPlugin as P; print(P(backend='mst').backend.value)"


@pytest.mark.parametrize(
    "imports",
    ["import accelerate; import mstpass", ""]
    + [pytest.param(f"import {name}", marks=pytest.mark.full) for name in ("mstpass", "torch")],
)
def test_order_of_imports(imports):
    """One import at most; none where mstpass is installed, because torch calls it."""
    pytest.importorskip("accelerate")
    if "mstpass" not in imports and not ENTRY:
        pytest.skip("mstpass is not installed with its entry points")
    assert python(f"{imports}\n{USE}") == ["MST"]
