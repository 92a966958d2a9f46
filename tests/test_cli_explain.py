"""``mstpass explain FILE.py:FUNCTION``: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from mstpass.cli.main import main

STEPS = textwrap.dedent(
    """
    import torch
    import torch.nn.functional as F
    from sizes_of_steps import WIDTH

    head = torch.nn.Linear(WIDTH, 4096, bias=False)

    def inputs():
        return torch.randn(1024, WIDTH), torch.zeros(1024, dtype=torch.long)

    def named_inputs():
        return dict(zip(("h", "y"), inputs()))

    def loss(h, y):
        return F.cross_entropy(head(h), y)

    def whole_step():
        return loss(*inputs())

    def make():
        return loss, *inputs()

    def make_nothing():
        return 3

    def make_error():
        raise KeyError("data")

    def runs_backward(h, y):
        loss(h, y).backward()

    def steps_optimizer(h, y):
        torch.optim.SGD(head.parameters(), 0.1).step()
        return loss(h, y)

    def branches(h, y):
        value = loss(h, y)
        return value * 2 if value > 3 else value

    def prints(h, y):
        hidden = h * head.weight.mean()
        # a comment
        print("between")
        return loss(hidden, y)

    def needs_data(h, y):
        return loss(h / h.max().item(), y)

    def no_such_name(h, y):
        return head.nothing(h)

    def wrong_shapes(h, y):
        return head(h.t())

    def no_gradient(h, y):
        return loss(h, y).detach()

    def other_arguments(a):
        return head(a)
    """
)


@pytest.fixture
def step(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "sizes_of_steps.py").write_text("WIDTH = 64\n")
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    return lambda name: str(tmp_path / name)


@pytest.mark.parametrize(
    "argv",
    [
        ["steps.py:loss"],
        ["steps.py:loss", "--inputs", "named_inputs", "--device", "meta"],
        ["steps.py:whole_step"],
        ["steps.py:make", "--build", "--device", "meta"],
    ],
)
def test_ways_to_name_a_step(
    argv: list[str], step: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", step(argv[0]), *argv[1:]]) == 0
    shown = capsys.readouterr()
    assert "lm_head  fused" in shown.out and "steps.py:15" in shown.out and not shown.err


def test_files_and_points(
    step: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    argv = [step("steps.py:loss"), "--json", str(out), "--pareto", "--option", "chunk_tokens=128"]
    assert main(["explain", *argv]) == 0
    data = json.loads(out.read_text())
    assert data["schema"] == "mstpass-report/1" and data["regions"][0]["chunk_tokens"] == 128
    assert len(data["details"]["pareto"]) == 6
    shown = capsys.readouterr().out
    assert "memory_budget=0.0" in shown and "<- this plan" in shown
    argv[2] = str(tmp_path / "no" / "such" / "folder.json")
    assert main(["explain", *argv]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["nothing.py:loss"], 2, "there is no file"),
        (["steps.py"], 2, "is not of the form FILE.py:FUNCTION"),
        (["steps.py:lost"], 2, "has no function lost; it has inputs, named_inputs, loss"),
        (["broken.py:loss"], 2, "importing.*ModuleNotFoundError at broken.py:1: No module"),
        (["steps.py:loss", "--option", "chunk_token=3"], 2, "Did you mean 'chunk_tokens'"),
        (["steps.py:loss", "--option", "strict"], 2, "write NAME=VALUE"),
        (["steps.py:loss", "--inputs", "given"], 2, "has no function given that makes them"),
        (["steps.py:make_nothing", "--build"], 2, "returned int"),
        (["steps.py:make_error", "--build"], 1, "raised KeyError at steps.py:27"),
        (["steps.py:other_arguments"], 1, "other_arguments"),
        (["steps.py:runs_backward", "--fullgraph"], 1, "steps.py:30: .*call backward outside"),
        (["steps.py:steps_optimizer"], 1, "steps.py:33: .*step the optimizer outside"),
        (["steps.py:branches", "--fullgraph"], 1, "steps.py:38: .*torch.where"),
        (["steps.py:prints", "--fullgraph"], 1, "steps.py:43: .*print.* without --fullgraph"),
        (["steps.py:needs_data"], 1, "steps.py:47: .*value of a tensor.*move that line out"),
        (["steps.py:no_such_name"], 1, "steps.py:50: .*no attribute 'nothing'"),
        (["steps.py:wrong_shapes"], 1, "steps.py:53: .*(shape|size|dim)"),
        (["steps.py:no_gradient"], 1, "no backward"),
    ],
)
def test_errors_are_one_line(
    argv: list[str],
    code: int,
    message: str,
    step: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", step(argv[0]), *argv[1:]]) == code
    shown = capsys.readouterr()
    assert not shown.out and len(shown.err.splitlines()) == 1, shown.err
    assert shown.err.startswith("mstpass explain: ") and re.search(message, shown.err), shown.err


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of what crosses
def test_each_graph_has_a_report_and_a_file(
    step: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["explain", step("steps.py:prints"), "--json", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("mstpass report") == 2 and not shown.err
    first, second = shown.out.split("graph 2 of 2")
    assert "graph 1 of 2" in first and "lm_head  fused" in second
    assert re.search(r"(?s)torch.compile breaks it, at steps.py:43: .*print", first)
    kinds = [
        [region["kind"] for region in json.loads(path.read_text())["regions"]]
        for path in (out, tmp_path / "plan-2.json")
    ]
    assert kinds == [[], ["lm_head"]] and not (tmp_path / "plan-3.json").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explain", "--help"])
    assert stop.value.code == 0 and "examples:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["explain", "a.py:f", "--device", "nowhere"])
    assert stop.value.code == 2
