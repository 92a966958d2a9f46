"""The demo: its parts, and one whole run with a tiny model."""

import json
from pathlib import Path

import pytest
import torch

from mstpass import stdlib_text as text
from mstpass.bench.huggingface import Scale
from mstpass.demo import main, run
from mstpass.demo.run import BACKENDS, Row

pytestmark = pytest.mark.op_by_op

PNG = b"\x89PNG\r\n\x1a\n"


def rows(difference=0.0):
    losses = (3.0, 2.5, 2.25)
    return {
        name: Row(
            name,
            None,
            None,
            None,
            9.0,
            2**20,
            seconds=[1.0, 2.0],
            losses=[x + i * difference for x in losses],
        )
        for i, name in enumerate(BACKENDS)
    }


@pytest.fixture(scope="module")
def pieces():
    return text.read_sources(100_000)


def test_sources_are_the_same_each_time_and_as_long_as_asked(pieces):
    assert sum(map(len, pieces)) == 100_000
    assert pieces == text.read_sources(100_000)


def test_a_python_without_sources_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(text.NoTextError, match=str(tmp_path)):
        text.read_sources(10)


def test_tokens_give_back_the_text(pieces):
    tokenizer = text.train_tokenizer(pieces, 2048)
    assert tokenizer.get_vocab_size() == 2048
    stream_T = text.encode(tokenizer, pieces)
    assert stream_T.max() < tokenizer.get_vocab_size()
    words = [tokenizer.id_to_token(i) for i in stream_T[:50].tolist()]
    shown = "".join(words).replace("Ġ", " ").replace("Ċ", "\n")
    assert pieces[0].startswith(shown)


def test_batches_are_deterministic_pieces_of_the_stream():
    stream_T = torch.arange(1000)
    first, again = (text.batches(stream_T, steps=3, batch=2, length=8) for _ in range(2))
    assert len(first) == 3
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
        assert a.shape == (2, 8)
        assert torch.equal(a - a[:, :1], torch.arange(8).expand(2, 8))


def test_too_little_text_is_named():
    with pytest.raises(text.NoTextError, match="8"):
        text.batches(torch.arange(8), steps=1, batch=1, length=8)


def test_picture(tmp_path):
    path = tmp_path / "new" / "demo.png"
    run.draw(rows(), "three steps", path)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("difference", [0.0, 0.1, float("nan")])
def test_losses_that_part_fail_the_demo(difference):
    result = run.result_of("three steps", rows(difference))
    assert all(target.met for target in result.targets) == (difference == 0.0)
    assert result.tables[0].columns[-1] == "max diff to eager"


def test_from_text_to_picture(tmp_path, monkeypatch, capsys):
    small = Scale(2048, layers=1, width=32, mlp_width=64, heads=2, batch=2, length=128)
    monkeypatch.setattr(run, "_QUICK", small)
    monkeypatch.setattr(run, "_QUICK_TEXT_CHARS", 100_000)
    assert main(["--quick", "--steps", "3", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("eager", "Inductor", "mst's plan", "picture:", "demo.png"):
        assert word in shown
    assert Path(tmp_path / "demo.png").read_bytes().startswith(PNG)
    record = json.loads((tmp_path / "demo.json").read_text())
    ((result,), setup) = record["results"], record["setup"]
    assert [row["name"] for row in result["rows"]] == ["eager", "Inductor", "mst"]
    assert all(len(row["losses"]) == 3 for row in result["rows"]) and setup["width"] == 32
