"""Run code that was generated for a GPU on the CPU, its Triton kernels interpreted.

    TRITON_INTERPRET=1 python -m tests.cuda.interpret FOLDER

``FOLDER`` holds forward.py, backward.py and values.pt; outputs and gradients are written to
results.pt. It is a process of its own because Triton reads the variable when it is imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.cuda.dry_run import DryRun

_ON_CPU = {  # of the generated code, each with what it becomes
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = int",
    "torch._C._dynamo.guards._empty_strided_cuda": "torch._C._dynamo.guards._empty_strided_cpu",
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.cuda.set_device(0)": "pass",
    "async_compile.triton(": "interpreted(",
    "device(type='cuda', index=0)": "device(type='cpu')",
    **{
        f"torch.ops.mstpass.{op}.": f"torch.ops.mstpass_tests.{op}."
        for op in ("offload", "reload", "wait_tensor")
    },
}
_BLOCKS = {"XBLOCK": 64, "YBLOCK": 16, "R0_BLOCK": 128, "R1_BLOCK": 16}


def run_interpreted(run: DryRun, folder: Path) -> tuple[list[Any], list[Any]]:
    """The outputs of forward and the gradients of a step of one scalar, for a tangent of 1."""
    for name, code in zip(("backward", "forward"), _both(run), strict=True):
        (folder / f"{name}.py").write_text(code)
    values = {
        "primals": list(run.primals),
        "outputs": run.results,
        "saved": run.saved,
    }
    torch.save(values, folder / "values.pt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.interpret", str(folder)],
        env={**_environment(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    results = torch.load(folder / "results.pt", weights_only=False)
    return results["outputs"], results["gradients"]


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _both(run: DryRun) -> tuple[str, str]:
    """The code of backward and of forward, which are told apart by their first line."""
    (forward,) = (code for code in run.code.modules if "_forward" in code.splitlines()[0])
    (backward,) = (code for code in run.code.modules if "_backward" in code.splitlines()[0])
    return backward, forward


# ---- in the other process ----------------------------------------------------------------------
def main(folder: Path) -> None:
    import tests.host_on_cpu  # noqa: F401  # it defines the ops mstpass_tests

    _round_to_nearest()
    values = torch.load(folder / "values.pt", weights_only=False)
    results = _load(folder / "forward.py")(list(values["primals"]))
    by_name = dict(zip(values["outputs"], results, strict=True))
    given = [
        torch.ones((), dtype=results[0].dtype) if name.startswith("tangents") else by_name[name]
        for name in values["saved"]
    ]
    outputs = [results[0]]
    gradients = _load(folder / "backward.py")(given)
    torch.save({"outputs": outputs, "gradients": gradients}, folder / "results.pt")


def _round_to_nearest() -> None:
    """Triton's interpreter cuts bfloat16 off, where a GPU rounds."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = rounded


def _load(path: Path) -> Callable[[list[Any]], list[Any]]:
    """The function ``call`` of a generated module."""
    code = path.read_text()
    for found, replaced in _ON_CPU.items():
        code = code.replace(found, replaced)
    space: dict[str, Any] = {
        "interpreted": lambda name, source, **_: _kernel(name, source, path.parent),
        "__name__": path.stem,
    }
    exec(compile(code, str(path), "exec"), space)
    return space["call"]


def _kernel(name: str, source: str, folder: Path) -> Any:
    """The kernel of a piece of generated code."""
    import triton.language as tl

    # Both are functions of the GPU; Triton's language has interpreted ones of the same names.
    source = re.sub(r"from torch\._inductor\.runtime\.triton_helpers import .*", "", source)
    source = source.replace("import triton_helpers, triton_heuristics", "import triton_helpers")
    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    path = folder / f"{name[:60]}_{abs(hash(source))}.py"
    path.write_text(source)
    space = {
        "triton_heuristics": _Heuristics(),
        "libdevice": tl,
        "tl_math": tl,
        "__name__": name,
        "__file__": str(path),
    }
    exec(compile(source, str(path), "exec"), space)
    return space[name]


class _Heuristics:
    """In place of the decorators that choose a configuration."""

    def __getattr__(self, name: str) -> Any:
        return lambda **given: lambda fn: _Kernel(fn, given["triton_meta"])


class _Kernel:
    def __init__(self, fn: Any, meta: Mapping[str, Any]):
        self.fn, self.names = fn, list(meta["signature"])

    def run(self, *values: Any, stream: Any = None) -> None:
        import triton

        blocks = {name: _BLOCKS[name] for name in self.names if name in _BLOCKS}
        names = [name for name in self.names if name not in _BLOCKS]
        given = dict(zip(names, values, strict=True))
        sizes = ((given.get("xnumel", 1), "XBLOCK"), (given.get("ynumel", 1), "YBLOCK"))
        grid = tuple(triton.cdiv(size, blocks.get(block, 1)) for size, block in sizes)
        self.fn[grid](**given, **blocks)


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
