"""`mstpass plan` on the command line: its JSON output, and wrong arguments."""

from __future__ import annotations

import json

import pytest

from mstpass.cli.main import main
from mstpass.gpus import gpu

pytest.importorskip("transformers")
pytest.importorskip("rich")


MIB = 2**20


def test_command_prints_json(tiny, capsys):
    given = ["plan", "--model", tiny, "--device-memory", "200MiB", "--overhead", "0"]
    given += ["--optimizer", "sgd", "--sequence", "2048", "--alone"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["rows"][-1]["length"] == 2048
    assert found["rows"][-1]["parts"]["saved"] > 0


def test_a_gpu_has_its_memory(tiny, capsys):
    given = ["plan", "--model", tiny, "--gpu", "a100-40gb", "--sequence", "2048", "--alone"]
    assert main([*given, "--json"]) == 0
    request = json.loads(capsys.readouterr().out)["request"]
    assert request["gpu"] == "a100-40gb"
    assert request["device_bytes"] == gpu("a100-40gb").memory_bytes


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--device-memory", "lots"], "not a size"),
        (["--device-memory", "1GiB", "--sequence", "0"], "whole number"),
        (["--device-memory", "1GiB", "--sharding", "fsdp"], "needs --gpus"),
        (["--device-memory", "1GiB", "--dtype", "fp32", "--master-weights"], "--dtype bf16"),
        (["--device-memory", "1GiB", "--optimizer", "sgd", "--optimizer-step", "foreach"], "AdamW"),
        (["--device-memory", "1GiB", "--outputs", "other"], "dropped"),
        (["--device-memory", "1GiB", "--document", "0"], "whole number"),
        ([], "--device-memory"),
        (["--gpu", "a1000"], "did you mean 'a100'"),
    ],
)
def test_wrong_arguments_are_refused(capsys, rest, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "gpt2", *rest])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama3-8x", "did you mean 'llama3-8b'"),
        ("no/config.json", "this file does not exist"),
        ("broken.json", "cannot read this config.json"),
    ],
)
def test_an_unknown_or_broken_model_is_named(capsys, tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert main(["plan", "--model", model, "--device-memory", "80GiB"]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_a_model_that_is_too_large_says_so(capsys):
    assert main(["plan", "--model", "llama3-8b", "--device-memory", "8GiB"]) == 1
    assert "does not fit" in capsys.readouterr().err
