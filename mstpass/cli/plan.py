"""`mstpass plan`: the longest sequence, or the cheapest plan of a given one, on a device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mstpass.byte_sizes import parse_bytes
from mstpass.errors import require
from mstpass.planner.accounting import (
    DTYPES,
    OPTIMIZER_STEPS,
    OPTIMIZERS,
    SHARDINGS,
    Training,
)
from mstpass.planner.data import ALLOCATORS, EXPANDABLE, LOGITS, OUTPUTS

OVERHEAD = "1.25GiB"  # CUDA's context, and what an "80 GiB" card lacks of them
EXAMPLES = """examples:
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit --sequence 65536
  mstpass plan --model llama3-70b --device-memory 80GiB --sharding zero3 --ranks 16 --alone
  mstpass plan --model path/to/config.json --device-memory 24GiB --json > plan.json

exit codes: 0 it fits, 1 it does not or its step cannot be traced, 2 called wrongly
"""
FITS, FAILED, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] = ()) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    sharding = "zero3" if given.sharding == "fsdp" else given.sharding
    if sharding != "none" and given.ranks < 2:
        parser.error(f"--sharding {given.sharding} needs --ranks of at least 2")
    if given.optimizer_in_backward and sharding != "none":
        parser.error("--optimizer-in-backward goes with --sharding none only")
    if given.master_weights and given.dtype != "bf16":
        parser.error("--master-weights are for --dtype bf16: other weights are fp32 already")
    if given.optimizer_step == "foreach" and not OPTIMIZERS[given.optimizer].temporaries:
        parser.error(f"--optimizer-step foreach is known for AdamW's, not for {given.optimizer}")
    require(("transformers",), "hf", "mstpass plan")
    require(("rich",), "viz", "mstpass plan")
    from mstpass.planner.data import Request
    from mstpass.planner.models import ModelError
    from mstpass.planner.plan import plan
    from mstpass.planner.terminal_table import show

    training = Training(
        dtype=given.dtype,
        optimizer=given.optimizer,
        master_weights=given.master_weights,
        optimizer_in_backward=given.optimizer_in_backward,
        optimizer_step=given.optimizer_step,
        sharding=sharding,
        ranks=given.ranks,
        batch=given.batch,
        document=given.document,
    )
    request = Request(
        model=given.model,
        training=training,
        device_bytes=given.device_memory,
        overhead_bytes=given.overhead,
        length=given.sequence,
        logits=given.logits,
        outputs=given.outputs,
        allocator=given.allocator,
        alone=given.alone,
    )
    try:
        with _Progress() as advance:
            planned = plan(request, advance)
    except ModelError as error:
        print(f"mstpass plan: {error}", file=sys.stderr)
        return BAD_INPUT
    if given.json:
        data = {**dataclasses.asdict(planned), "fits": planned.own.fits}
        del data["sizes"]["each"]
        print(json.dumps(data, indent=1))
    else:
        show(planned)
    return FITS if planned.own.fits else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mstpass plan",
        description="The longest sequence that a training step can have on a device, or with "
        "--sequence the cheapest plan that fits, from fake tensors alone: no GPU, no weights. "
        "Beside it what eager, checkpointing, Inductor and MST's recipe need.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="a shipped name such as llama3-8b, or a config.json")
    add("--device-memory", required=True, type=_size, metavar="SIZE", help="such as 80GiB")
    add("--sequence", type=_count, metavar="TOKENS", help="plan this length")
    add("--batch", type=_count, default=1, help="sequences on one device (1)")
    add("--document", type=_count, metavar="TOKENS", help="of a sequence; the rest is padding, "
        "which attention skips (none)")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bf16", help="autocast: fp32 weights, bf16 products")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="; ".join(
        f"{name}: {optimizer.text}" for name, optimizer in OPTIMIZERS.items()))  # fmt: skip
    add("--master-weights", action="store_true", help="an fp32 copy of bf16 weights")
    add("--optimizer-in-backward", action="store_true", help="each gradient is used and dropped")
    add("--optimizer-step", choices=OPTIMIZER_STEPS, default="fused", help="foreach: torch.optim's "
        "default, which needs temporary values for all parameters at once")  # fmt: skip
    add("--sharding", choices=(*SHARDINGS, "fsdp"), default="none", help="fsdp is zero3")
    add("--ranks", type=_count, default=1, help="devices that share what is sharded (1)")
    add("--overhead", type=_size, default=OVERHEAD, metavar="SIZE", help="of the device, not for "
        f"tensors: CUDA's context ({OVERHEAD})")  # fmt: skip
    add("--allocator", choices=ALLOCATORS, default=EXPANDABLE, help="caching: PyTorch's default, "
        "simulated, with its gaps; expandable: expandable_segments:True, without")  # fmt: skip
    add("--logits", choices=LOGITS, default="model", help="of the eager rows; fp32: upcast, as "
        "transformers had it before 4.45")  # fmt: skip
    add("--outputs", choices=OUTPUTS, default="held", help="of the eager rows; held: until "
        "backward is over, as by `outputs = model(...)`")  # fmt: skip
    add("--alone", action="store_true", help="mst's plan only: faster")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _size(text: str) -> int:
    size = int(text) if text.isdigit() else parse_bytes(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 80GiB or 512MiB")
    return size


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class _Progress:
    """On standard error, where that is a terminal; gone when done or interrupted."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns: tuple[Any, ...] = (
            SpinnerColumn(),
            TextColumn("planning"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Callable[[str], None]:
        if self._bar.console.is_terminal:
            self._bar.start()
        return lambda what: self._bar.update(self._task, description=what)

    def __exit__(self, *exception: object) -> None:
        if self._bar.console.is_terminal:
            self._bar.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
