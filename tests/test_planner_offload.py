"""`mstpass plan --offload`: saved values of mst's row wait in host memory."""

from __future__ import annotations

import io
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")

from rich.console import Console

from mstpass.cli.plan import main
from mstpass.planner import eager_rows
from mstpass.planner.eager_rows import checkpointed
from mstpass.planner.eager_step import eager_step
from mstpass.planner.models import config_of
from mstpass.planner.plan import plan
from mstpass.planner.request import CHECKPOINT, Request, Row, TrainingPlan, silent
from mstpass.planner.room import Room
from mstpass.planner.terminal_table import show
from mstpass.planner.training import Training
from tests.planner_models import TINY, plan_sizes

MIB = 2**20

pytestmark = pytest.mark.usefixtures("one_cublas_workspace")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("deep") / "config.json"
    path.write_text(json.dumps({**TINY, "num_hidden_layers": 8, "vocab_size": 64}))
    return str(path)


@pytest.mark.full
def test_host_memory_makes_a_long_sequence_fit(deep: str) -> None:
    def planned(host_bytes: int) -> TrainingPlan:
        training = Training(dtype="bf16", optimizer="adamw")
        request = Request(deep, training, 100 * MIB, 0, 16384, alone=True, host_bytes=host_bytes)
        return plan(request)

    without, with_host = planned(0), planned(1024 * MIB)
    assert not without.own.fits and without.own.host_bytes == 0
    assert with_host.own.fits and 0 < with_host.own.host_bytes <= 1024 * MIB
    assert with_host.own.extra_time is not None and without.own.extra_time is not None
    assert with_host.own.extra_time < without.own.extra_time
    told = io.StringIO()
    show(with_host, Console(file=told, width=100))
    assert "on the host" in told.getvalue() and "'host_budget': '1GiB'" in told.getvalue()
    assert any("pinned host memory" in note for note in with_host.notes)
    assert not any("pinned" in note for note in without.notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host-memory", "4GiB"], "--host-memory is of use only with --offload"),
        (["--offload", "--host-memory", "much"], "'much' is not a size"),
    ],
)
def test_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--model", "llama3-8b", "--device-memory", "80GiB", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_inputs_of_checkpointed_layers_wait_on_the_host(deep: str) -> None:
    """Eight layers of [1, 16384, 128] in bf16; one of them is back at a time."""
    config, layers = config_of(deep), 8
    kept, away = (
        eager_step(config, Training(), checkpointed, 16384, offload=offload)
        for offload in (False, True)
    )
    one = 16384 * 128 * 2
    assert kept.host_bytes == 0 and away.host_bytes == pytest.approx(layers * one, rel=0.01)
    freed = kept.parts.total - away.parts.total
    assert (layers - 3) * one < freed <= layers * one


def test_the_host_limits_eager_rows(deep: str) -> None:
    """As much host memory as half of the longest sequence needs leaves half of it."""

    def longest(host_bytes: int) -> Row:
        room = Room(Request(deep, Training(), 60 * MIB, 0, host_bytes=host_bytes), plan_sizes(deep))
        recipe = eager_rows.ways(room.request)[CHECKPOINT]
        search = eager_rows._Search(room, config_of(deep), recipe, silent)
        return search.row(CHECKPOINT)

    roomy = longest(1024 * MIB)
    assert roomy.fits and "wait on the host" in roomy.keeps
    short = longest(roomy.host_bytes // 2)
    assert short.fits and short.host_bytes <= roomy.host_bytes // 2
    assert short.length == pytest.approx(roomy.length / 2, rel=0.02)
