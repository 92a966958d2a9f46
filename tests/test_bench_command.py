"""The command line, the targets, the output files and the processes of benchmarks."""

import os

import pytest
import torch

from mstpass.bench import loops, processes
from mstpass.bench.results import Result, Table, Target, write_markdown
from mstpass.cli.main import main

CPU = torch.device("cpu")


@pytest.mark.parametrize(("value", "met"), [(1.0, True), (1.1, False), (None, False)])
def test_a_target_is_met_or_missed(value, met):
    target = Target("time", value, 1.0)
    assert target.met is met
    assert str(target).endswith("met" if met else "missed")


def test_markdown_replaces_its_section_and_keeps_the_rest(tmp_path):
    path = tmp_path / "new" / "results.md"
    result = Result("loops", "Loops", targets=[Target("time", 2.0, 1.0)])
    result.tables.append(Table("t", ("", "time"), (("a|b", "1.00x"),)))
    write_markdown(path, result, CPU)
    path.write_text("before\n" + path.read_text() + "after\n")
    result.title = "Loops again"
    write_markdown(path, result, CPU)
    text = path.read_text()
    assert text.startswith("before\n# Measured\n")
    assert text.endswith("<!-- /bench:loops -->\nafter\n")
    assert text.count("<!-- bench:loops -->") == 1
    assert "Loops again" in text
    assert "| a\\|b | 1.00x |" in text
    assert "- time: 2.000, target <= 1.00: missed" in text


@pytest.mark.parametrize(
    "bench",
    ["loops", "peers", "compile", "pareto", "budgets", "long", "experts", "optimizer", "all"],
)
def test_help_has_examples(bench, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", bench, "--help"])
    assert stop.value.code == 0
    assert f"  mstpass bench {bench} --" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--device", "abacus"], ["--large"]])
def test_called_wrongly(argv):
    with pytest.raises(SystemExit) as stop:
        loops.main(argv)
    assert stop.value.code == 2


def test_a_function_runs_in_a_new_process():
    assert processes.call("it", os.path.join, {"a": "x"}) == ["x"]


def test_a_process_that_takes_too_long_or_fails_says_so():
    with pytest.raises(processes.ProcessFailed, match="it took more than 0 s") as slow:
        processes.call("a step", os.path.join, {"a": "x"}, timeout_s=0.01)
    assert slow.value.why == "it took more than 0 s"
    text = "Traceback:\n  RuntimeError: inside\nValueError: no such luck\n\nlast\n"
    assert processes.last_error(text) == "ValueError: no such luck"
    assert processes.last_error("one\nlast\n") == "last" and processes.last_error("") == ""
