"""The README: its Python blocks run as they stand, one after the other, in one namespace; its
figures are those of the results page; its links exist."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.op_by_op

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PEERS = ROOT / "docs" / "results" / "peers.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
GPU = re.compile("<!-- bench:gpu -->.*?<!-- /bench:gpu -->", re.DOTALL)
MOST_LINES = 220


def blocks():
    text = README.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        first_line = text.count("\n", 0, match.start(1))
        # blank lines in front, so that a traceback shows the README's own line number
        yield "\n" * first_line + match.group(1)


# Dynamo asks each tensor between two graphs for its .grad, and silences the warning for users
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the README writes a report
    torch.compiler.reset()
    namespace = {"__name__": "readme"}
    sources = list(blocks())
    assert len(sources) >= 4
    # what torchrun and init_process_group() give the FSDP2 block, for one process
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for source in sources:
            exec(compile(source, str(README), "exec"), namespace)
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def rows(path):
    """The cells of each table row, without marks of emphasis and without ranges in brackets.

    The table of GPU results has a test of its own (tests/test_bench_gpu_results.py).
    """
    for line in GPU.sub("", path.read_text(encoding="utf-8")).splitlines():
        if line.startswith("| "):
            cells = (re.sub(r"\*\*|\(.*?\)", "", cell).strip() for cell in line.split("|")[1:-1])
            yield tuple(cells)


def test_the_table_has_the_measured_figures():
    measured = {row[0]: set(row) for row in rows(PEERS)}
    shown = [row for row in rows(README) if row[0] in measured and row[0]]
    assert {"eager", "Inductor", "mst", "mst, memory_budget=0.0"} <= {row[0] for row in shown}
    for row in shown:
        assert set(row) <= measured[row[0]], row


def test_one_page():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_images_and_links_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert targets
    missing = [t for t in targets if not (README.parent / t).exists()]
    assert not missing
