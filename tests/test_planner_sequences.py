"""`mstpass plan --sequence-parallel`: ranks that share a sequence, and what exchanges cost."""

from __future__ import annotations

import functools
import io
import json

import pytest
import torch

from mstpass import gpus
from mstpass.graph.call_work import ExchangeWork
from mstpass.graph.gpu_costs import KERNEL_US, LINK, GpuCosts
from mstpass.planner.search import step_time
from mstpass.planner.training import Sizes, Training

pytest.importorskip("transformers")
pytest.importorskip("rich")
if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from rich.console import Console

from mstpass.cli.main import main
from mstpass.planner.compiled_step import planned
from mstpass.planner.eager_rows import checkpointed, minisequence, plain
from mstpass.planner.eager_step import eager_step
from mstpass.planner.models import config_of
from mstpass.planner.plan import plan
from mstpass.planner.request import Parts, Request, Row, silent
from mstpass.planner.search import BestSplit
from mstpass.planner.terminal_table import show
from mstpass.planner.traced_step import SequenceError, model_step, trace
from mstpass.tracing.devices import traced_for
from tests.planner_models import TINY, plan_sizes

pytestmark = pytest.mark.usefixtures("one_cublas_workspace")

MIB = 2**20
H100 = GpuCosts(gpus.gpu("h100"))


def traced(model, ranks, length, head_groups=1, **rest):
    training = Training(ranks=ranks, sequence_ranks=ranks, head_groups=head_groups)
    with traced_for("cuda", "h100"):
        return trace(config_of(model), training, length, **rest)


def config_file(path, **values):
    path.write_text(json.dumps({**TINY, **values}))
    return str(path)


# ---- the traced step ---------------------------------------------------------------------------
def test_a_rank_exchanges_heads_in_forward_and_backward(tiny):
    """Ulysses has two exchanges in the forward of a layer, and their gradients."""
    step = traced(tiny, 4, 2048, budgets=("free",))
    assert len(step.exchanges) == 4 and step.length == 2048
    found = planned(step, 2048, "free", None)
    assert 0 < found.exchange_us < found.us
    by_name = {v.name: v for v in (*found.problem.values, *found.problem.backward)}
    # of each token, queries of 128 features and keys and values, which are repeated for 4 ranks
    largest = max(by_name[name].bytes for name in step.exchanges)
    assert largest == 2048 * 3 * 128 * 2
    assert not torch.distributed.is_initialized()


def test_groups_of_heads_trade_time_for_memory(tmp_path):
    """A group is sent and sent back; in backward keys and values are sent back by themselves."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}
    model = config_file(tmp_path / "config.json", **heads, vocab_size=512)
    one, two = (traced(model, 2, 8192, budgets=(0.0,), head_groups=n) for n in (1, 2))
    assert len(one.exchanges) == 2 * 2 and len(two.exchanges) == 2 * 2 + 2 * 4
    of_one, of_two = (planned(step, 8192, 0.0, 0) for step in (one, two))
    assert of_two.peak_bytes < 0.8 * of_one.peak_bytes
    assert of_two.us > of_one.us, "backward computes attention once more"


def test_the_last_rank_of_a_ring_sees_all_keys(tiny):
    """3 ranks do not divide 4 heads; each of 2 rounds passes keys and values on, and home again."""
    step = traced(tiny, 3, 1024, budgets=("free",))
    assert len(step.exchanges) == 2 + 3
    flash = [v for v in step.problems["free"].values if "scaled_dot_product" in v.name]
    assert len(flash) == 3, "one block of keys for each rank"


def test_a_scaled_rank_is_the_traced_one(tiny):
    whole = traced(tiny, 2, 8192, budgets=("free",))
    short = traced(tiny, 2, 4100, budgets=("free",), multiple=512)
    exact = planned(whole, 8192, "free", None)
    scaled = planned(short, 8192, "free", None)
    assert scaled.parts.total == pytest.approx(exact.parts.total, rel=0.02)
    starts_us = KERNEL_US * len(whole.exchanges)  # which scaling takes to grow
    assert scaled.exchange_us == pytest.approx(exact.exchange_us, abs=starts_us)


def test_ranks_take_the_place_of_a_group_that_does_not_exist(tiny, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(SequenceError, match="is a rank of a process group already"):
        traced(tiny, 2, 1024, budgets=("free",))


def test_eager_steps_exchange_too(tiny):
    """The last of two ranks has about half of the step of one process, chunked losses included."""
    for recipe in (plain, functools.partial(checkpointed, logits="chunked"), minisequence):
        two, one = (
            eager_step(config_of(tiny), training, recipe, length).parts.total
            for training, length in (
                (Training(ranks=2, sequence_ranks=2), 8192),
                (Training(), 16384),
            )
        )
        assert 0.45 * one < two < 0.7 * one, recipe
    assert not torch.distributed.is_initialized()


# ---- plans -------------------------------------------------------------------------------------
def test_a_plan_of_four_ranks(tiny):
    training = Training(optimizer="sgd", sharding="zero3", ranks=4, sequence_ranks=4)
    found = plan(Request(tiny, training, 200 * MIB, 0, length=32768, alone=True))
    own, time = found.own, found.time
    assert own.fits and own.length == 32768 and own.exchange_us > 0
    alone = plan(Request(tiny, Training(optimizer="sgd"), 200 * MIB, 0, length=32768, alone=True))
    assert own.parts.total < 0.5 * alone.own.parts.total
    assert 0 < time.communication < 1 and time.sharding_us > 0
    console = Console(width=100, record=True, file=io.StringIO())
    show(found, console)
    shown = console.export_text()
    assert "of a rank" in shown and "8,192" in shown and "4 ranks share a sequence" in shown
    assert "links: 450 GB/s inside of a node, 50 between nodes" in shown


def test_the_best_split_of_a_given_length_is_the_fastest_that_fits(tiny):
    training = Training(optimizer="sgd", sharding="zero3", ranks=2)
    request = Request(tiny, training, 200 * MIB, 0, length=4096, alone=True, split=True)
    found = plan(request)
    assert [split.training.sequence_ranks for split in found.splits] == [1, 2]
    speeds = [split.time.tokens_per_s(split.training, 4096) for split in found.splits]
    best = max(range(2), key=speeds.__getitem__)
    assert found.request.training == found.splits[best].training
    console = Console(width=100, record=True, file=io.StringIO())
    show(found, console)
    assert "ways to divide the devices" in console.export_text()


def test_the_best_split_without_a_length_is_the_longest(tiny, monkeypatch):
    of_ranks = {1: 1000, 2: 900, 4: 400}  # tokens of a rank
    longest = lambda rows: of_ranks[rows.request.training.sequence_ranks]
    monkeypatch.setattr("mstpass.planner.compiled_rows.CompiledRows.about_longest", longest)
    training = Training(optimizer="sgd", sharding="zero3", ranks=4)
    request = Request(tiny, training, 60 * MIB, 0, split=True)
    best = BestSplit(request, plan_sizes(tiny), config_of(tiny), silent)
    assert [split.length for split in best.splits] == [1000, 1800, 1600]
    assert best.request.training.sequence_ranks == 2 and best.planned is None


def test_groups_of_heads_are_those_of_the_longest_sequence(tiny, monkeypatch):
    """Of four heads on two ranks: four groups are refused."""
    of_groups = {1: 900, 2: 1000}

    def longest(rows):
        training = rows.request.training
        with model_step(rows.config, training, 64):
            return of_groups[training.head_groups]

    monkeypatch.setattr("mstpass.planner.compiled_rows.CompiledRows.about_longest", longest)
    training = Training(optimizer="sgd", sharding="zero3", ranks=2, sequence_ranks=2)
    request = Request(tiny, training, 60 * MIB, 0, groups=True)
    best = BestSplit(request, plan_sizes(tiny), config_of(tiny), silent)
    assert [split.length for split in best.splits] == [1800, 2000]
    assert best.request.training.head_groups == 2


def test_more_groups_of_heads_only_where_fewer_do_not_fit(tiny, monkeypatch):
    training = Training(optimizer="sgd", sharding="zero3", ranks=4, sequence_ranks=4)

    def splits(fitting):
        fits = lambda rows: Row(
            "mst", "", 512, rows.request.training.head_groups >= fitting, Parts(), 0
        )
        monkeypatch.setattr("mstpass.planner.compiled_rows.CompiledRows.mst_row", fits)
        request = Request(tiny, training, 60 * MIB, 0, length=2048, groups=True)
        best = BestSplit(request, plan_sizes(tiny), config_of(tiny), silent)
        assert best.request.training == best.splits[-1].training and best.planned is not None
        return [split.training.head_groups for split in best.splits]

    assert splits(1) == [1]
    assert splits(2) == [1, 2]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--sequence-parallel"], "needs --gpus of at least 2"),
        (["--gpus", "1", "--sequence-parallel", "2"], "needs --gpus of at least 2"),
        (["--gpus", "8", "--sequence-parallel", "3"], "does not divide --gpus 8"),
        (["--gpus", "8", "--head-groups", "2"], "--head-groups needs --sequence-parallel"),
        (["--gpus", "8", "--sequence-parallel", "--attention", "flash"], "leave out --attention"),
        (["--gpus", "8", "--sequence-parallel", "--document", "8"], "leave out --attention"),
    ],
)
def test_wrong_ranks_are_refused(capsys, rest, message):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "gpt2", "--device-memory", "1GiB", *rest])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_names_a_sharding_of_as_many_ranks(capsys):
    given = ["plan", "--model", "llama3-8b", "--device-memory", "80GiB", "--alone"]
    assert main([*given, "--gpus", "6", "--sequence-parallel", "3"]) == 1
    assert "--sharding zero3 --gpus 3." in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["3", None])
def test_ranks_that_neither_heads_nor_a_ring_allow(tmp_path, capsys, ranks):
    window = {"model_type": "mistral", "architectures": None, "sliding_window": 64}
    model = config_file(tmp_path / "config.json", **window)
    given = ["plan", "--model", model, "--device-memory", "1GiB", "--gpus", "3", "--alone"]
    given += [
        "--overhead",
        "0",
        "--sequence",
        "3072",
        "--sequence-parallel",
        *([ranks] if ranks else []),
    ]
    assert main(given) == 2
    shown = capsys.readouterr().err
    assert "a window, which ring attention does not know" in shown and shown.count("\n") == 1


# ---- what links cost ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", gpus.GPUS)
def test_links_of_a_node_are_faster_than_those_between_nodes(name):
    kind = gpus.gpu(name)
    assert 0 < kind.links.between_bytes_per_us < kind.links.inside_bytes_per_us
    assert kind.links.inside_bytes_per_us < kind.memory_bytes_per_us
    assert "https://" in kind.links.source


@pytest.mark.parametrize(
    ("work", "bytes_per_us"),
    [
        (ExchangeWork(1e9, 8, in_turn=False), 450e3),
        (ExchangeWork(1e9, 8), 450e3),
        (ExchangeWork(1e9, 16), 50e3),  # the slowest link on the way round
        (ExchangeWork(1e9, 16, in_turn=False), 50e3 * 15 / 8),  # 8 of 15 parts leave the node
    ],
)
def test_the_slowest_link_decides(work, bytes_per_us):
    assert H100.exchange_us(work) == pytest.approx(KERNEL_US + 1e9 / (LINK * bytes_per_us))


def test_what_sharding_exchanges():
    sizes = Sizes(10**9, 10**8, 10**8)
    rate = LINK * 450e3

    def sharding_us(**rest):
        with traced_for("cuda", "h100"):
            return step_time(1e6, 0.0, sizes, Training(**rest)).sharding_us

    assert sharding_us() == 0
    gigabytes = {"none": 2, "zero1": 2, "zero2": 2, "zero3": 3}  # times the bytes of weights
    for sharding, times in gigabytes.items():
        expected = times * 2e9 * 7 / 8 / rate
        assert sharding_us(sharding=sharding, ranks=8) == pytest.approx(expected, rel=1e-3)
    # replicas in two nodes also add up a shard's gradients between them
    apart = sharding_us(sharding="zero3", ranks=8, replicas=2) - sharding_us(
        sharding="zero3", ranks=8
    )
    assert apart == pytest.approx(2 * 0.5 * 2e9 / 8 / (LINK * 50e3), rel=1e-2)
    across = sharding_us(sharding="zero3", ranks=16)
    assert across == pytest.approx(3 * 2e9 * 15 / 16 / (LINK * 50e3), rel=1e-3)
