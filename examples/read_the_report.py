"""Reads reports: the same LM head is chunked in one function, and refused in another.

A function that returns the loss lets mst compute the head chunk by chunk. A function that returns
the logits needs them in full; the report says why mst refuses it, and what to compile instead.
`mstpass.explain(fn, *args)` gives the same reports without compiling or running anything.

    python examples/read_the_report.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import mstpass

VOCABULARY, WIDTH, TOKENS = 8192, 128, 1024


def loss_only(h_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(h_TD @ head_VD.t(), labels_T)


def logits_only(h_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    return h_TD @ head_VD.t()


def compile_and_report(fn: Callable[..., Tensor]) -> mstpass.Report:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    h_TD = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    head_VD = torch.randn(VOCABULARY, WIDTH, device=device, requires_grad=True)
    labels_T = torch.randint(VOCABULARY, (TOKENS,), device=device)
    torch.compile(fn, backend="mst")(h_TD, head_VD, labels_T).sum().backward()
    return mstpass.reports()[-1]


def show(report: mstpass.Report) -> None:
    for region in report.regions:
        saved = (region.bytes_before - region.bytes_after) / 2**20
        print(f"  chunked: {region.kind}, {region.mode}, {region.num_chunks} chunks of")
        print(f"    {region.chunk_tokens} tokens, {saved:.0f} MiB less ({region.source})")
    for rejection in report.rejections:
        print(f"  refused in {rejection.stage}, at {rejection.node}: {rejection.reason}")
        print(f"    what to change: {rejection.fix}")


def main() -> tuple[mstpass.Report, mstpass.Report]:
    reports = []
    for fn in (loss_only, logits_only):
        print(f"{fn.__name__}:")
        reports.append(compile_and_report(fn))
        show(reports[-1])
    return reports[0], reports[1]


if __name__ == "__main__":
    main()
