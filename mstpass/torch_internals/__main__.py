"""``python -m mstpass.torch_internals``: run every probe, and one training step with loops.

Exits with 1 where a probe fails or the step's gradients are not eager's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from mstpass.torch_internals.probes import PROBES, Probe
from mstpass.torch_internals.versions import CHECKED, installed


def main() -> int:
    sys.stdout.write(
        f"The private APIs of torch {installed()} that mstpass uses; "
        f"checked with torch {', '.join(CHECKED)}\n"
    )
    failed = 0
    for probe in PROBES:
        wrong = _wrong(probe)
        failed += bool(wrong)
        lines = [f"{probe.name}: {wrong or 'ok'}", f"  {probe.purpose}"]
        lines += [f"    {api}" for api in probe.apis]
        if wrong:
            lines.append(f"  Lost without {probe.adapter}.py: {probe.lost}")
        sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.write(f"\n{failed} of {len(PROBES)} probes fail on this torch\n")
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


def _wrong(probe: Probe) -> str:
    """What is wrong with what the probe asks for; empty where nothing is."""
    try:
        probe.require()
    except Exception as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main() | trial())
