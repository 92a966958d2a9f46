"""Each benchmark runs once, with shapes of a few KiB; its figures follow from known rows."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass.bench import (
    axes,
    comparison,
    compile,
    dynamic,
    long,
    loops,
    peers,
    reconstruct,
    results,
)
from mstpass.bench.harness import Benchmark
from mstpass.bench.models import Head, LlamaSize, llama
from mstpass.bench.processes import ProcessFailed
from mstpass.graph import device_costs
from mstpass.graph.measured_costs import ChunkCosts
from mstpass.plans import ChunkPlan, Chunks, LoopPlan, Outcome

pytestmark = pytest.mark.op_by_op

CPU = torch.device("cpu")


def arguments(**changes):
    parsed = Benchmark("x", (), "").parse(["--device", "cpu", "--quick"])
    return dataclasses.replace(parsed, **changes)


def row(name, *seconds, **rest):
    return results.Row(name, seconds=list(seconds), **rest)


def test_peers_from_model_to_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "QUICK", LlamaSize(32, 1, 2, 64, 512, 64))
    monkeypatch.setattr(peers, "LIMITS", {"mst": (0.4, 1.02)})
    names = ["eager", "Inductor", "mst"]
    stand_ins = [
        comparison.eager(),
        comparison.eager("Inductor"),
        comparison.mst(),
    ]  # one that compiles is enough
    monkeypatch.setattr(peers, "_contenders", lambda *_: stand_ins)
    paths = [tmp_path / "peers.md", tmp_path / "peers.json"]
    argv = ["--quick", "--repeats", "1", "--device", "cpu"]
    assert peers.main([*argv, "--markdown", str(paths[0]), "--json", str(paths[1])]) == 0
    shown = capsys.readouterr().out
    for word in (*names, "time / Inductor", "target <= 0.40"):
        assert word in shown
    assert "| mst |" in paths[0].read_text()
    (result,) = json.loads(paths[1].read_text())["results"]
    assert [r["name"] for r in result["rows"]] == names
    assert all(r["error"] == "" and r["peak_bytes"] > 0 for r in result["rows"])


def test_peers_has_a_row_for_each_limit():
    names = [c.name for c in peers._contenders(*llama(LlamaSize(16, 1, 2, 32, 64, 20), CPU))]
    assert {*peers.LIMITS, "eager", "Inductor"} <= set(names)
    assert len(names) == len(set(names))


def test_loops_of_one_head(monkeypatch, tmp_path):
    monkeypatch.setattr(loops, "QUICK", loops.Sizes(64, 512, (16,), 4, (), 64, 32, 1))
    monkeypatch.setattr(loops, "_linear_cross_entropy", lambda *_: [])
    monkeypatch.setattr(loops, "inductor", lambda: comparison.eager("Inductor"))
    monkeypatch.setattr(loops, "auto_chunker", lambda **_: comparison.eager("auto_chunker"))
    monkeypatch.setattr(loops, "mst", lambda name="mst", **_: comparison.eager(name))
    known = ChunkCosts(((64, 1.5),), 1.0, 1.0)
    monkeypatch.setattr(loops, "measure", lambda device, quick: known)
    monkeypatch.setenv("MSTPASS_COSTS", str(tmp_path / "costs.json"))
    result = loops.run(arguments(repeats=1, store=True))
    assert device_costs.costs_of(CPU).table == known
    assert [t.what for t in result.targets] == ["d=16: time / Inductor", "d=16: peak / floor"]
    assert all(t.value is not None for t in result.targets)
    names = [line[0] for line in result.tables[0].rows]
    assert names == ["eager", "Inductor", "auto_chunker", "mst, 4 chunks", "mst, its own choice"]
    assert len(result.tables) == 4


TINY = axes.Sizes(64, 8, 128, 8, 512, 32, 32, 3, 4, 8, 2, 4, 48, 4, 4, 8, 128)


def test_axes_of_one_loss(monkeypatch):
    """The table names the axis and the number of chunks of each loop."""
    monkeypatch.setattr(axes, "QUICK", dataclasses.replace(TINY, tokens=256, words=2048))
    monkeypatch.setattr(axes, "inductor", lambda: comparison.eager("Inductor"))
    result = axes.run(arguments(repeats=1, model=["chunked by hand"]))
    (table,) = result.tables
    free, least = (dict(zip(table.columns, line, strict=True)) for line in table.rows)
    assert free[""] == "chunked by hand: 4 parts, N=2 x 256, d=8, V=2048, fp32"
    assert (free["budget"], least["budget"]) == ("free", "0.0")
    assert least["loops"] == "fused: tokens in 2", least
    assert [t.what for t in result.targets] == [
        "chunked by hand: peak / Inductor",
        "chunked by hand: time / Inductor",
    ]
    assert all(t.value is not None for t in result.targets)


@pytest.mark.parametrize("name", axes.CASES)
def test_each_case_of_axes_is_a_step(name):
    work = axes.CASES[name].build(TINY, CPU)
    step = work.step(work.fn)
    value, gradients = step.with_gradients()
    again, _ = step.with_gradients()
    assert len(gradients) == len(step.leaves)
    assert torch.equal(value, again) and torch.isfinite(value).all()


def test_equal_loops_are_counted():
    def report(*counts):
        chunks = [Chunks("tokens", 8 * n, 8, n) for n in counts]
        loops = tuple(LoopPlan("forward", (), (), (), (), chunks=each) for each in chunks)
        plan = ChunkPlan("lm_head", "fused", "", 64, 8, 8, 0, 0, loops, (), ())
        return mstpass.Report(Outcome(regions=(plan,)))

    text = results.axes_text([report(4, 2), report(4, 2), report(4)])
    assert text == "2 x fused: tokens in 4, tokens in 2; fused: tokens in 4"
    assert results.axes_text([]) == ""


def test_dynamic_runs_every_length(monkeypatch):
    monkeypatch.setattr(dynamic, "_QUICK_SIZE", LlamaSize(16, 1, 2, 32, 64))
    monkeypatch.setattr(dynamic, "_QUICK_LENGTHS", (20, 30, 25, 11))
    seen = []

    def record(fn, **_):
        return lambda ids, target: seen.append(ids.shape[1]) or fn(ids, target)

    monkeypatch.setattr(torch, "compile", record)
    result = dynamic.run(arguments(repeats=2))
    names = [line[0] for line in result.tables[0].rows]
    assert names == ["Inductor", "mst", "Inductor, static", "mst, static"]
    assert seen[:4] == [20, 30, 25, 11]
    assert result.targets[1].value > 0


@pytest.mark.full
def test_long_with_shared_keys(monkeypatch):
    monkeypatch.setattr(long, "QUICK", LlamaSize(32, 1, 4, 64, 256, 512))
    result = long.run(arguments(repeats=1, grouped=True))
    (steps,) = result.tables
    assert [line[0] for line in steps.rows][1:] == [
        'mst, memory_budget=0, chunk="tokens"',
        'mst, memory_budget=0, chunk="heads"',
        "mst, memory_budget=0",
    ]
    assert len(result.targets) == 2 and all(t.value is not None for t in result.targets)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have it")
def test_torchs_own_chunked_head_is_the_same_loss():
    head = Head.build(16, 8, 64, CPU)
    rows = comparison.compare(
        [comparison.eager(), *loops._linear_cross_entropy(head, 4)],
        head.work(),
        arguments(repeats=1),
    )
    assert [r.error for r in rows.values()] == ["", "", ""]


def test_compile_shows_a_process_that_fails(monkeypatch):
    size = LlamaSize(16, 1, 2, 32, 64, 16)

    def process(case, device, folder):
        if case.chunks == 64:
            raise ProcessFailed("it", "Traceback\nValueError: too many")
        hits = {"autograd": 1, "fx": 2, "reports": 1}
        return {"compile_s": 2.0 if case.backend == "mst" else 1.0, "hits": hits}

    monkeypatch.setattr(compile, "QUICK", size)
    monkeypatch.setattr(compile, "_process", process)
    result = compile.run(arguments())
    lines = {line[0]: line for line in result.tables[0].rows}
    assert lines["mst, 2 layers"][1:3] == ("2.000", "2.00x (2.00-2.00)")
    assert "autograd 1, fx 2" in lines["mst, 2 layers"][4]
    assert lines["mst, 1 layers, 64 chunks"][2] == "ValueError: too many"
    assert [t.met for t in result.targets] == [False, False, False]


def test_a_compile_process_measures(monkeypatch):
    monkeypatch.setattr(compile, "_warm_up", lambda device: None)
    monkeypatch.setattr(compile.Case, "compile", lambda case, fn: fn)
    case = dataclasses.asdict(compile.Case("mst", LlamaSize(16, 1, 2, 32, 64, 16), 2))
    result = compile.work("cpu", case)
    assert result["later_s"] > 0
    assert result["hits"]["fx"] == 0


def test_reconstruct_compares_the_modes(monkeypatch):
    pytest.importorskip("transformers")
    saved = iter((400, 400, 300, 500, 400, 400))
    monkeypatch.setattr(reconstruct, "CASES", reconstruct.CASES[:1])
    monkeypatch.setattr(reconstruct, "QUICK", reconstruct.sized(16, 1, 32, 64, 1, 16))
    monkeypatch.setattr(reconstruct, "mst", lambda name, **_: comparison.eager(name))

    def write_plan(row, reports):
        row.saved_bytes = None if row.name == "eager" else next(saved)

    monkeypatch.setattr(comparison, "write_plan", write_plan)
    result = reconstruct.run(arguments(repeats=1))
    names = [line[1] for line in result.tables[0].rows]
    assert names[0] == "eager" and names[3:5] == [
        "tolerant, memory_budget=0.1",
        "off, memory_budget=0.0",
    ]
    (target,) = [t for t in result.targets if "bytes" in t.what]
    assert target.met and target.value == 0.75
    times = [line[-1] for line in result.tables[0].rows]
    assert times[1] == times[4] == "1.00x (1.00-1.00)"
    assert len([t for t in result.targets if "time" in t.what]) == 4
    eager, off, *_ = result.records["OLMo-2, fp32"]
    assert 0 < off["gradient_error"] == eager["gradient_error"] < 1e-4 and off["peak_bytes"] > 0


def test_each_mode_has_to_win():
    case = reconstruct.CASES[1]
    assert case.autocast and not reconstruct.CASES[0].autocast
    saved = {"off": 400, "exact": 400, "tolerant": 300}
    assert reconstruct._won(case, saved) == 1.0
    assert reconstruct._won(reconstruct.CASES[0], saved) == 0.75
    assert reconstruct._won(case, {"off": 400, "exact": 300, "tolerant": 240}) == 0.8
