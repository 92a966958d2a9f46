"""The runner of PyTorch's own tests, on a small folder of tests that stands for PyTorch's."""

from __future__ import annotations

import ast
import json
import tarfile
import time
from pathlib import Path

import pytest
import torch

from tests.torch_suite import sources
from tests.torch_suite.files import FILES, SuiteFile
from tests.torch_suite.on_cpu import on_cpu
from tests.torch_suite.runner import MST, TORCH, Runner, read
from tests.torch_suite.table import markdown, own_failures

FILE = SuiteFile("functorch/test_small.py", "small tests")
TESTS = """
import os
import time
import unittest
import torch
from torch import a_name_that_no_torch_has

def gradient(backend):
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    return x.grad

class Small(unittest.TestCase):
    def test_graphs(self):
        torch.testing.assert_close(gradient("aot_eager"), torch.ones(4).cos())

    def test_default_backend(self):
        torch.compile(lambda x: x.sin())(torch.ones(4))

    def test_calls_no_backend(self):
        pass

    @unittest.skipIf(not torch.cuda.is_available(), "requires a GPU")
    def test_names_a_gpu(self):
        self.assertEqual(torch.ones(4, device="cuda").cuda().device.type, "cpu")

    def test_fails(self):
        self.fail("as it should")

    def test_fails_under_mst_only(self):
        self.assertEqual(torch._inductor.compile_fx.compile_fx.__code__.co_filename.count("mst"), 0)

    @a_name_that_no_torch_has
    def test_a_name_is_missing(self):
        pass

    def test_hangs(self):
        time.sleep(100)

    def test_kills_its_process(self):
        os._exit(3)
"""


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_table(tmp_path: Path) -> None:
    about = {"file": FILE.name, "backend": MST}
    failed = {"outcome": "failed", "calls": 1, "reason": "ValueError: wrong\nmore"}
    rows = [
        {**about, "collected": 5},
        {**about, "test": "A::a", "outcome": "passed", "calls": 2, "reason": ""},
        {**about, "test": "A::b", **failed},
        {**about, "test": "A::c", **failed},
        {**about, "test": "A::d", "outcome": "skipped", "calls": 0, "reason": "no GPU"},
        {**about, "backend": TORCH, "test": "A::c", **failed},
        {**about, "backend": TORCH, "test": "A::b", "outcome": "passed", "reason": ""},
    ]
    _write(tmp_path / "results", rows)
    known = read(tmp_path / "results")
    assert own_failures(FILE, known) == ["A::b"]
    text = markdown([FILE], known)
    assert "| functorch/test_small.py | small tests | 5 | 3 | 3 | 1 | 1 | 1 | 1 | 1 |" in text
    assert "`A::b`: ValueError: wrong\n" in text and "`A::c`" not in text
    assert "- 1: no GPU" in text


def test_every_file_is_named_once() -> None:
    assert len({file.name for file in FILES}) == len(FILES)


ON_A_GPU = """
DEVICE_TYPE = acc.type if (acc := torch.accelerator.current_accelerator()) else 'cpu'

@requires_cuda
@unittest.skipIf(not HAS_GPU, 'requires a GPU')
@unittest.skipIf(TEST_WITH_ROCM, 'other')
@parametrize('device', ['cpu', GPU_TYPE])
def test(self, device):
    x = torch.ones(4, device='cuda:0').cuda(non_blocking=True).to(GPU_TYPE)
    if device == GPU_TYPE:
        x = x.xpu()
"""
ON_THE_CPU = """
DEVICE_TYPE = 'xpu'

@unittest.skipIf(TEST_WITH_ROCM, 'other')
@parametrize('device', ['cpu', GPU_TYPE])
def test(self, device):
    x = torch.ones(4, device='cpu').cpu().to('cpu')
    if device == GPU_TYPE:
        x = x.cpu()
"""


def test_the_cpu_takes_the_place_of_a_gpu() -> None:
    assert ast.unparse(on_cpu(ON_A_GPU)) == ON_THE_CPU.strip()


def test_a_release_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "pytorch-1"
    for name in ("test/functorch/test_small.py", "torch/__init__.py"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text(TESTS, encoding="utf-8")
    version = torch.__version__.partition("+")[0]
    release = tmp_path / f"v{version}.tar.gz"
    monkeypatch.setattr(sources, "_RELEASE", f"file://{tmp_path}/v{{version}}.tar.gz")
    monkeypatch.setattr(sources, "_CACHE", tmp_path / "cache")
    with pytest.raises(sources.DownloadError, match=rf"torch {version} from file://.*--source"):
        sources.test_folder(None)
    with tarfile.open(release, "w:gz") as tar:
        tar.add(checkout, arcname=checkout.name)
    for _ in range(2):  # the second time without the release
        folder = sources.test_folder(None)
        files = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
        assert files == ["functorch/test_small.py"]
        release.unlink(missing_ok=True)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"v{version}"]


@pytest.mark.full
def test_the_runner(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    path = folder / FILE.path
    path.parent.mkdir(parents=True)
    path.write_text(TESTS, encoding="utf-8")
    results = tmp_path / "results"
    runner = Runner(folder, results, limit_s=20, until=time.monotonic() + 500)
    runner.run([FILE])
    known = read(results)
    of_mst = {name: row["outcome"] for name, row in known[FILE.name, MST].tests.items()}
    assert of_mst == {
        "Small::test_graphs": "passed",
        "Small::test_default_backend": "passed",
        "Small::test_calls_no_backend": "passed",
        "Small::test_names_a_gpu": "passed",
        "Small::test_fails": "failed",
        "Small::test_fails_under_mst_only": "failed",
        "Small::test_a_name_is_missing": "skipped",
        "Small::test_hangs": "failed",
        "Small::test_kills_its_process": "failed",
    }
    tests = known[FILE.name, MST].tests
    for name in ("Small::test_graphs", "Small::test_default_backend"):
        assert tests[name]["calls"] == 1, name
    assert tests["Small::test_calls_no_backend"]["calls"] == 0
    assert "a_name_that_no_torch_has" in tests["Small::test_a_name_is_missing"]["reason"]
    assert "longer than 20 s" in tests["Small::test_hangs"]["reason"]
    assert own_failures(FILE, known) == ["Small::test_fails_under_mst_only"]
    before = results.read_text(encoding="utf-8")
    runner.run([FILE])
    assert results.read_text(encoding="utf-8") == before, "a later call has nothing left to run"
