"""The private APIs that mstpass uses are in the installed torch, and do what is expected."""

from __future__ import annotations

import pytest

from mstpass.torch_internals import __main__ as runner
from mstpass.torch_internals.private_apis import PrivateApis, TorchChangedError


@pytest.mark.parametrize("name", [*runner.names()])
def test_the_installed_torch_has(name: str) -> None:
    runner.load(name).probe()


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
    apis = PrivateApis((api,), checked=("2.11", "2.13"))
    with pytest.raises(TorchChangedError, match=message.replace(".", r"\.")) as error:
        apis.require()
    assert "checked with torch 2.11, 2.13" in str(error.value)


def test_one_of_several_names_is_enough() -> None:
    PrivateApis(("torch._ops.Nothing | torch._ops.OpOverload",), checked=("2.13",)).require()


def test_the_runner_fails_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "names", lambda: iter(("op_types",)))
    assert runner.main() == 0
    assert "op_types: ok" in capsys.readouterr().out
    monkeypatch.delattr("torch._ops.OpOverload")
    assert runner.main() == 1
    assert "op_types: TorchChangedError: torch" in capsys.readouterr().out
