"""The command line: what it prints, and its exit codes."""

import importlib.metadata
import types

import pytest

from mstpass.cli.main import main
from mstpass.demo import parse


def exit_code(argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    return stop.value.code


def test_version(capsys):
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"mstpass {importlib.metadata.version('mstpass')}"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--help"], "mstpass bench peers"),
        (["bench", "--help"], "compile"),
        (["demo", "--help"], "--quick"),
    ],
)
def test_help(argv, shown, capsys):
    assert exit_code(argv) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["bench"],
        ["bench", "nothing"],
        ["demo", "--unknown"],
        ["demo", "--steps", "1"],
        ["demo", "--steps", "many"],
    ],
)
def test_called_wrongly(argv, capsys):
    assert exit_code(argv) == 2
    assert "usage: mstpass" in capsys.readouterr().err


def test_the_rest_of_the_line_goes_to_the_command(monkeypatch):
    seen = []
    fake = types.SimpleNamespace(main=lambda argv: seen.append(argv) or 7)
    monkeypatch.setattr("importlib.import_module", lambda name: seen.append(name) or fake)
    assert main(["bench", "peers", "--repeats", "3", "--help"]) == 7
    assert seen == ["mstpass.bench.peers", ["--repeats", "3", "--help"]]


def test_interrupted(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("mstpass.cli.main._entry", lambda module: interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(
        "mstpass.errors.find_spec", lambda name: None if name == "tokenizers" else True
    )
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "needs tokenizers" in error
    assert "pip install 'mstpass[hf,viz]'" in error


def test_the_demo_defaults():
    assert parse([]).steps > parse(["--quick"]).steps >= 2
    assert parse(["--quick", "--steps", "9"]).steps == 9
