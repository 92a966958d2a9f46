"""The benchmarks: their parts on rows of known numbers, and each once with shapes of a few KiB."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

import mstpass
from mstpass.bench import (
    comparison,
    compile,
    dynamic,
    hand_tiled,
    loops,
    peers,
    reconstruct,
)
from mstpass.bench.arguments import parse
from mstpass.bench.models import Head, LlamaSize, Step, llama
from mstpass.bench.output import write_markdown
from mstpass.bench.tables import Result, Table, Target
from mstpass.cli.main import main
from mstpass.graph import device_costs
from mstpass.graph.device_costs import ChunkCosts
from mstpass.plans import Outcome, SavedValue, SavePlan

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def arguments(**changes):
    return dataclasses.replace(parse("x", ["--device", "cpu", "--quick"], "", ""), **changes)


def row(name, *seconds, **rest):
    return comparison.Row(name, seconds=list(seconds), **rest)


def test_ratios_are_taken_round_by_round():
    assert comparison.ratios(row("a", 2.0, 6.0, 9.0), row("b", 1.0, 2.0, 10.0)) == (2.0, 0.9, 3.0)


def test_no_ratio_without_both_or_after_an_error():
    assert comparison.ratios(row("a"), row("b", 1.0)) is None
    assert comparison.ratios(row("a", 1.0), row("b", 1.0, 1.0)) is None
    assert comparison.ratios(row("a", 1.0, error="broke"), row("b", 1.0)) is None


@pytest.mark.parametrize(("value", "met"), [(1.0, True), (1.1, False), (None, False)])
def test_a_target_is_met_or_missed(value, met):
    target = Target("time", value, 1.0)
    assert target.met is met
    assert str(target).endswith("met" if met else "missed")


def test_the_floor_of_a_head():
    head = Head.build(100, 8, 50, CPU)
    assert head.floor_bytes(chunks=3) == 4 * (50 * 8 + 100 * 8 + 34 * 50)


def test_own_code_is_another_code_object_with_the_same_result():
    offset = 3
    fn = lambda: torch.tensor(1) + offset
    assert comparison.own_code(fn)() == fn()
    assert comparison.own_code(fn).__code__ is not fn.__code__


def test_hand_tiled_parts_equal_the_plain_model():
    model, ids_BS, target_BS = llama(LlamaSize(16, 1, 2, 32, 64, 20), CPU)
    leaves = list(model.parameters())
    right, gradients = Step(lambda: model(ids_BS, target_BS), leaves).with_gradients()
    # 20 tokens in 3 tiles: the last one is shorter
    tiled_fn = lambda: model(ids_BS, target_BS, checkpointed=True, chunks=3)
    loss, tiled_gradients = Step(tiled_fn, leaves).with_gradients()
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(tiled_gradients, gradients)
    assert all(leaf.grad is None for leaf in leaves)


def test_the_tiled_loss_scales_with_its_tangent():
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target = torch.randint(5, (6,))
    found = torch.autograd.grad(3 * hand_tiled.head_loss(x, w, target, 4), (x, w))
    right = torch.autograd.grad(3 * F.cross_entropy(x @ w.T, target), (x, w))
    torch.testing.assert_close(found, right)


def test_one_that_fails_and_one_that_is_wrong_do_not_end_the_race():
    head = Head.build(8, 4, 10, CPU)

    def broken():
        raise ValueError("no such luck")

    contenders = [
        comparison.eager(),
        comparison.eager("broken", broken),
        comparison.eager("wrong value", lambda: 2 * head.loss()),
        comparison.eager(
            "wrong gradient", lambda: head.loss() + (head.weight - head.weight.detach()).sum()
        ),
    ]
    seen = []
    rows = comparison.compare(
        contenders, head.loss, head.step, repeats=2, device=CPU, advance=seen.append
    )
    assert rows["eager"].error == ""
    assert len(rows["eager"].seconds) == 2
    assert rows["eager"].peak_bytes > 0
    assert rows["broken"].error == "ValueError: no such luck"
    assert "value differs" in rows["wrong value"].error
    assert "gradient differs" in rows["wrong gradient"].error
    assert seen.count("eager") == 4


def test_a_gradient_that_is_no_number_is_wrong_and_one_of_noise_is_not():
    x, w = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)

    def loss(of_x, of_w):
        return lambda: (x * of_x).sum() + (w * of_w).sum() * 1e-30

    run = comparison.Comparison(loss(1.0, 1.0), lambda fn: Step(fn, (x, w)), CPU)
    run.add([comparison.eager(), comparison.eager("noise", loss(1.0, -1.0))])
    run.add([comparison.eager("nan", lambda: loss(1.0, 1.0)() + 0 * (w.log() * 0).sqrt().sum())])
    assert run.rows["eager"].error == run.rows["noise"].error == ""
    assert "a gradient differs from that of eager by nan" in run.rows["nan"].error


def test_contenders_that_are_added_later_are_timed_in_the_same_rounds():
    head = Head.build(8, 4, 10, CPU)
    run = comparison.Comparison(head.loss, head.step, CPU)
    run.add([comparison.eager()])
    run.measure_peaks()
    peak = run.rows["eager"].peak_bytes
    run.add([comparison.eager("late"), comparison.eager("wrong", lambda: 2 * head.loss())])
    run.time(2)
    run.measure_peaks()
    assert run.rows["eager"].peak_bytes == peak == run.rows["late"].peak_bytes
    assert len(run.rows["eager"].seconds) == len(run.rows["late"].seconds) == 2
    assert "value differs" in run.rows["wrong"].error


def test_markdown_replaces_its_section_and_keeps_the_rest(tmp_path):
    path = tmp_path / "new" / "results.md"
    result = Result("loops", "Loops", targets=[Target("time", 2.0, 1.0)])
    result.tables.append(Table("t", ("", "time"), (("a|b", "1.00x"),)))
    write_markdown(path, result, arguments())
    path.write_text("before\n" + path.read_text() + "after\n")
    result.title = "Loops again"
    write_markdown(path, result, arguments())
    text = path.read_text()
    assert text.startswith("before\n# Measured\n")
    assert text.endswith("<!-- /bench:loops -->\nafter\n")
    assert text.count("<!-- bench:loops -->") == 1
    assert "Loops again" in text
    assert "| a\\|b | 1.00x |" in text
    assert "- time: 2.000, target <= 1.00: missed" in text


@pytest.mark.parametrize("bench", ["loops", "peers", "compile", "pareto", "budgets", "all"])
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
    assert {*peers.LIMITS, *peers.LARGE_LIMITS, "eager", "Inductor"} <= set(names)
    assert len(names) == len(set(names))


def test_loops_of_one_head(monkeypatch, tmp_path):
    monkeypatch.setattr(loops, "QUICK", loops.Sizes(64, 512, (16,), 4, (), 64, 32, 1))
    monkeypatch.setattr(loops, "_linear_cross_entropy", lambda *_: [])
    monkeypatch.setattr(loops, "inductor", lambda: comparison.eager("Inductor"))
    monkeypatch.setattr(loops, "auto_chunker", lambda **_: comparison.eager("auto_chunker"))
    monkeypatch.setattr(loops, "mst", lambda name="mst", **_: comparison.eager(name))
    known = ChunkCosts(((64, 1.5),), 1.0, 1.0)
    monkeypatch.setattr(loops.measure_chunk_costs, "measure", lambda device, quick: known)
    monkeypatch.setenv("MSTPASS_COSTS", str(tmp_path / "costs.json"))
    result = loops.run(arguments(repeats=1, store=True))
    assert device_costs.costs_of(CPU) == known
    assert [t.what for t in result.targets] == ["d=16: time / Inductor", "d=16: peak / floor"]
    assert all(t.value is not None for t in result.targets)
    names = [line[0] for line in result.tables[0].rows]
    assert names == ["eager", "Inductor", "auto_chunker", "mst, 4 chunks", "mst, its own choice"]
    assert len(result.tables) == 3


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


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have it")
def test_torchs_own_chunked_head_is_the_same_loss():
    head = Head.build(16, 8, 64, CPU)
    rows = comparison.compare(
        [comparison.eager(), *loops._linear_cross_entropy(head, 4)],
        head.loss,
        head.step,
        repeats=1,
        device=CPU,
    )
    assert [r.error for r in rows.values()] == ["", "", ""]


def test_compile_shows_a_process_that_fails(monkeypatch):
    size = LlamaSize(16, 1, 2, 32, 64, 16)

    def process(case, device, folder):
        if case.chunks == 64:
            raise RuntimeError("ValueError: too many")
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
    result = compile._work(CPU, compile.Case("mst", LlamaSize(16, 1, 2, 32, 64, 16), 2))
    assert result["later_s"] > 0
    assert result["hits"]["fx"] == 0


def test_reconstruct_compares_the_modes(monkeypatch):
    pytest.importorskip("transformers")
    saved = iter((400, 400, 300, 500, 400, 400))
    monkeypatch.setattr(reconstruct, "CASES", reconstruct.CASES[:1])
    monkeypatch.setattr(reconstruct, "QUICK", reconstruct.Size(16, 1, 32, 64, 1, 16))
    monkeypatch.setattr(reconstruct, "_compiled", lambda mode, budget, quick: lambda fn: fn)

    def report():
        value = SavedValue("x", next(saved), "")
        return mstpass.Report(Outcome(save_plan=SavePlan((value,), "min_cut")))

    monkeypatch.setattr(reconstruct.mstpass, "reports", lambda: [report()])
    result = reconstruct.run(arguments(repeats=1))
    lines = [line[1:3] for line in result.tables[0].rows]
    assert lines[:3] == [("0.1", "off"), ("", "exact"), ("", "tolerant")]
    assert [line[0] for line in lines[3:]] == ["0.0", "", ""]
    (target,) = [t for t in result.targets if "bytes" in t.what]
    assert target.met and target.value == 0.75
    times = [line[-1] for line in result.tables[0].rows]
    assert times[1] == "as off" and times[5] == "as exact"  # their plans are equal: one program
    assert len([t for t in result.targets if "time" in t.what]) == 2
    record = result.records["OLMo-2, fp32, 0.1"]
    assert record["off"]["error"] < 1e-5 and record["off"]["peak_bytes"] > 0


def test_each_mode_has_to_win():
    case = reconstruct.CASES[1]
    assert case.autocast and not reconstruct.CASES[0].autocast
    saved = {"off": 400, "exact": 400, "tolerant": 300}
    assert reconstruct._won(case, saved) == 1.0
    assert reconstruct._won(reconstruct.CASES[0], saved) == 0.75
    assert reconstruct._won(case, {"off": 400, "exact": 300, "tolerant": 240}) == 0.8


def test_the_gradient_error_of_a_step():
    right = [torch.ones(4), torch.full((4,), 1e-12)]
    found = [torch.ones(4) * 1.01, torch.zeros(4)]  # the second is zero but for noise
    assert reconstruct.error(found, right) == pytest.approx(0.01, rel=1e-4)
