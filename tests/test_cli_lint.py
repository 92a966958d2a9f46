"""``mstpass lint FILE.py:FUNCTION``: what it prints, and its exit codes."""

import json
import textwrap

import pytest

from mstpass.cli.main import main

STEPS = textwrap.dedent(
    """
    import torch
    from torch.utils.checkpoint import checkpoint
    from neighbour import WIDTH

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(x).relu()

    net, x = Net(), torch.randn(4, WIDTH, requires_grad=True)

    def inner(x):
        return checkpoint(net, x, use_reentrant=True)

    def nested():
        checkpoint(inner, x, use_reentrant=False).sum().backward()

    def clean():
        return checkpoint(net, x, use_reentrant=False).sum()

    def wrong():
        return x @ x

    def leave():
        raise SystemExit(3)

    def idle():
        pass
    """
)


@pytest.fixture
def step(tmp_path):
    (tmp_path / "neighbour.py").write_text("WIDTH = 8\n")
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    return lambda name: str(tmp_path / name)


def test_findings(step, capsys):
    assert main(["lint", step("steps.py:nested")]) == 1
    shown = capsys.readouterr().out
    assert "Net: nested checkpoints" in shown
    assert "ran     1x in forward, recomputed 2x in backward" in shown
    assert "checkpoint() at steps.py:" in shown


def test_clean(step, capsys):
    assert main(["lint", step("steps.py:clean")]) == 0
    assert "nothing is computed more often than needed" in capsys.readouterr().out


def test_modules(step, capsys):
    assert main(["lint", "--modules", step("steps.py:nested")]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["layer", "1", "2", "512", "flop"] in rows  # 2 x 4 x 8 x 8


def test_json(step, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["lint", step("steps.py:nested"), "--json", str(path)]) == 1
    assert json.loads(path.read_text())["findings"][0]["recompute_runs"] == 2


@pytest.mark.parametrize(("share", "code"), [("0", 1), ("0.9", 0)])
def test_min_share(step, share, code, capsys):
    assert main(["lint", step("steps.py:nested"), "--min-share", share]) == code


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("steps.py", "is not of the form FILE.py:FUNCTION"),
        ("steps.py:", "is not of the form FILE.py:FUNCTION"),
        ("nowhere.py:step", "there is no file"),
        ("steps.py:nowhere", "has no function nowhere; it has "),
        ("steps.py:x", "has no function x; it has "),
        ("broken.py:step", "ModuleNotFoundError at broken.py:1"),
        ("steps.py:wrong", "RuntimeError at steps.py:26"),
        ("steps.py:leave", "raised SystemExit at steps.py:29: 3"),
        ("steps.py:idle", "ran no backward"),
        ("steps.py:idle --compiled", "ran no backward"),
        ("steps.py:clean --compiled", "Inductor compiled nothing"),
        ("steps.py:clean --json /no/such/folder/x", "cannot write"),
    ],
)
def test_bad_input(step, name, message, capsys):
    name, *options = name.split()
    assert main(["lint", step(name), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("mstpass lint: ")
    assert not captured.out


@pytest.mark.parametrize("argv", [[], ["a.py:b", "--unknown"], ["a.py:b", "--min-share", "2"]])
def test_called_wrongly(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["lint", *argv])
    assert stop.value.code == 2
    assert "usage: mstpass lint" in capsys.readouterr().err


def test_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["lint", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "mstpass lint train.py:step --compiled" in shown
    assert "1 findings" in shown
