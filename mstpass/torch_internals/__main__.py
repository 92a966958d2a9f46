"""``python -m mstpass.torch_internals``: run every probe, and one training step with loops.

Exits with 1 where a probe fails or the step's gradients are not eager's.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import mstpass.torch_internals as package
from mstpass.torch_internals.versions import CHECKED

_NO_PROBE = ("__main__", "patches", "private_apis", "versions")


def main() -> int:
    sys.stdout.write(
        f"The private APIs of torch {torch.__version__} that mstpass uses; "
        f"checked with torch {', '.join(CHECKED)}\n"
    )
    failed = 0
    for name in names():
        purpose, apis, wrong = _row(name)
        failed += bool(wrong)
        lines = [f"{name}: {wrong or 'ok'}", f"  {purpose}", *(f"    {api}" for api in apis)]
        sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.write(f"\n{failed} of {len(list(names()))} files do not fit this torch\n")
    return 1 if failed else 0


def trial(backend: Any = "mst") -> int:
    """Run a step with loops in forward and backward. Returns 1 where it is not as eager's."""
    torch.manual_seed(0)
    x, up, head = (torch.randn(*shape) / 4 for shape in ((256, 16), (16, 96), (96, 700)))
    labels = torch.arange(256)

    def loss(x: torch.Tensor, up: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.gelu(x @ up) @ head, labels)

    def gradients(step: Any) -> tuple[torch.Tensor, ...]:
        leaves = [leaf.clone().requires_grad_() for leaf in (x, up, head)]
        return torch.autograd.grad(step(*leaves), leaves)

    options = {"strict": True, "chunk_tokens": 64, "memory_budget": 0.0}
    given: dict[str, Any] = {"options": options} if backend == "mst" else {}
    try:
        found = gradients(torch.compile(loss, backend=backend, fullgraph=True, **given))
    except Exception as error:
        sys.stdout.write(f"\nA step with loops: {_text(error)}\n")
        return 1
    exact = gradients(loss)
    worst = max(float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True))
    sys.stdout.write(f"\nA step with loops: gradients are eager's to within {worst:.1e}\n")
    return int(not worst < 1e-5)


def names() -> Iterator[str]:
    """The files that have a probe."""
    for found in pkgutil.iter_modules(package.__path__):
        if found.name not in _NO_PROBE:
            yield found.name


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{package.__name__}.{name}")


def _row(name: str) -> tuple[str, tuple[str, ...], str]:
    """What the file is for, its APIs, and what is wrong."""
    try:
        module = load(name)
    except Exception as error:
        return "", (), _text(error)
    purpose = (inspect.getdoc(module) or "").partition("\n")[0]
    try:
        module.probe()
    except Exception as error:
        return purpose, module.APIS.names, _text(error)
    return purpose, module.APIS.names, ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main() | trial())
