"""Every example runs, is short, and shows what its docstring promises."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checks import compiles_kernels
from tests.forks import run_ranks_of

pytestmark = pytest.mark.op_by_op

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main()


def test_train_llama():
    losses = run("train_llama")
    assert losses[-1] < losses[0]


def test_compile_model():
    losses, peak, eager_peak = run("compile_model")
    assert losses[-1] < losses[0]
    assert peak < 0.5 * eager_peak or not compiles_kernels()


def test_plain_pytorch():
    assert run("plain_pytorch") < 1e-5


def test_read_the_report():
    taken, refused = run("read_the_report")
    assert [region.kind for region in taken.regions] == ["lm_head"]
    assert not refused.regions
    assert any("logits" in rejection.reason for rejection in refused.rejections)


def test_find_double_recompute():
    before, after, _ = run("find_double_recompute")
    nested = [f for f in before.findings if f.kind == "nested checkpoints"]
    assert [(f.forward_runs, f.recompute_runs) for f in nested] == [(1, 2)] * 4
    assert not after.findings
    assert before.step_flops - before.wasted_flops == after.step_flops


def test_own_solver():
    rows, difference, report = run("own_solver")
    own = [row for row in rows if row.solver == "largest_half"]
    assert own and not any(row.error for row in own)
    assert len({row.solver for row in rows}) > 7
    assert difference < 1e-5
    assert report.outcome.save_plan.solver == "largest_half"


@pytest.mark.full
def test_lora():
    losses, peak, logits_bytes = run("lora")
    assert losses[-1] < losses[0]
    assert peak < 0.6 * logits_bytes


def test_gradient_accumulation():
    error, compiled = run("gradient_accumulation")
    assert compiled == 1
    assert error < 1e-5


def heads(reports):
    return [region for report in reports for region in report.regions if region.kind == "lm_head"]


def test_hf_trainer(monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("MSTPASS_LOGITS", "drop")
    losses, report = run("hf_trainer")
    assert losses[-1] < losses[0] and len(heads([report])) == 1


@pytest.mark.full  # test_trainers.py runs the same trainer
@pytest.mark.filterwarnings("ignore")
def test_trl_grpo():
    pytest.importorskip("trl")
    logged, report = run("trl_grpo")
    assert logged["entropy"] > 0 and len(heads([report])) == 1


@pytest.mark.filterwarnings("ignore")
def test_lightning_module():
    pytest.importorskip("lightning")
    losses, report = run("lightning_module")
    assert losses[-1] < losses[0] and len(heads([report])) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_torchtitan_blocks():
    pytest.importorskip("triton.language")
    pytest.importorskip("torchtitan")
    error, reports = run("torchtitan_blocks")
    assert error < 1e-5 and len(heads(reports)) == 1


@pytest.mark.full
def test_accelerate_loop():
    """By Accelerate's own command line, in a script that names no backend."""
    pytest.importorskip("accelerate")
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
    command = [*launch, "--dynamo_backend", "mst", str(EXAMPLES / "accelerate_loop.py")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "MSTPASS_LOGITS": "drop"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"lm_head +fused", done.stdout)


def printed_by_ranks(name, ranks=2):
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    program = ["tests.ranks.example", str(EXAMPLES / f"{name}.py")]
    done = run_ranks_of(program, ranks)
    assert not any(rank.returncode for rank in done), [rank.stderr[-4000:] for rank in done]
    return "".join(rank.stdout for rank in done)


def run_on_two_ranks(name):
    """The error of a gradient, the peaks of another backend and of mst, and all that it printed."""
    printed = printed_by_ranks(name)
    peaks = re.search(r"peak: \w+ ([\d.]+) MiB, mst ([\d.]+) MiB", printed)
    error = re.search(r"difference of a gradient to eager's: (\S+)", printed)
    assert peaks and error
    return float(error[1]), float(peaks[1]), float(peaks[2]), printed


def losses_of_one_process(steps):
    """Without mst. Each step has micro-batches of one row; ``steps`` draws them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for rows in steps():
        parts = [model(input_ids=ids, labels=ids).loss / len(rows) for ids in rows]
        sum(parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts).item())
    return losses


def shares_sequences(name, steps, ranks):
    printed = printed_by_ranks(name, ranks)
    found = re.search(rf"tokens of a rank: {-(-1021 // ranks)}, losses: \[(.*)\]", printed)
    assert found
    assert ranks > 2 or re.search(r"lm_head +(fused|mixed) ", printed)  # of 4 each has few tokens
    expected = pytest.approx(losses_of_one_process(steps), rel=1e-5)
    assert [float(x) for x in found[1].split(",")] == expected


@pytest.mark.full  # test_sequence_parallel.py and the next test run the same model
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses(ranks):
    shares_sequences("ulysses", lambda: 3 * [[torch.randint(4096, (1, 1021))]], ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ulysses_fsdp2(ranks):
    shares_sequences("ulysses_fsdp2", lambda: 3 * [[torch.randint(4096, (1, 1021))]], ranks)


@pytest.mark.full
def test_ulysses_accelerate():
    pytest.importorskip("accelerate")
    steps = functools.partial(torch.randint, 4096, (3, 2, 1, 1021))
    shares_sequences("ulysses_accelerate", steps, 2)


@pytest.mark.full
def test_fsdp2():
    error, inductor_mib, mst_mib, _ = run_on_two_ranks("fsdp2")
    assert mst_mib < 0.6 * inductor_mib
    assert error < 1e-5


@pytest.mark.full
def test_fsdp2_blocks():
    error, eager_mib, mst_mib, printed = run_on_two_ranks("fsdp2_blocks")
    assert mst_mib < 0.5 * eager_mib
    assert error < 1e-5
    assert printed.count("mstpass report") == 2, "equal blocks compile once"


@pytest.mark.full
def test_ddp():
    error, eager_mib, mst_mib, printed = run_on_two_ranks("ddp")
    assert mst_mib < 0.5 * eager_mib
    assert error < 1e-5
    assert "this is part 1 of" in printed


@pytest.mark.full
def test_tensor_parallel():
    error, inductor_mib, mst_mib, _ = run_on_two_ranks("tensor_parallel")
    assert mst_mib < 0.5 * inductor_mib
    assert error < 1e-5


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_tested(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    assert "def main(" in source
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8")
