"""``mstpass plan``: the longest sequence that fits on a device, or the cheapest plan of one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mstpass.argument_parsers import add_gpu, byte_size, command_parser, count
from mstpass.errors import require
from mstpass.gpus import gpu
from mstpass.planner.progress import Report, pieces
from mstpass.planner.request import ALLOCATORS, EXPANDABLE, LOGITS, OUTPUTS, Request
from mstpass.planner.result import TrainingPlan
from mstpass.planner.training import (
    ATTENTIONS,
    DTYPES,
    FLASH,
    MODEL,
    OPTIMIZER_STEPS,
    OPTIMIZERS,
    SHARDINGS,
    Training,
)
from mstpass.progress import progress_bar

FITS, FAILED, BAD_INPUT = 0, 1, 2
_PICTURES = ".png, .svg, .pdf"
_HOST_MEMORY = "128GiB"
_OVERHEAD = "1.25GiB"  # CUDA's context, and what an "80 GiB" card lacks of 80 GiB

_DESCRIPTION = """\
Find the longest sequence that a training step can have on a device, or with
--sequence the cheapest plan that fits. The step is traced on fake tensors, so
neither a GPU nor weights are needed. The table also shows what eager mode,
checkpointing, Inductor and the MST recipe need."""

_EXAMPLES = """\
examples:
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit
  mstpass plan --model llama3-8b --gpu h200 --sequence 65536
  mstpass plan --model llama3-70b --device-memory 80GiB \\
               --sharding zero3 --ranks 16 --alone
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit \\
               --offload --host-memory 256GiB
  mstpass plan --model path/to/config.json --device-memory 24GiB --json

exit codes: 0 it fits, 1 it does not fit or its step cannot be traced,
2 wrong arguments"""


def main(argv: Sequence[str] = ()) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    _check_combinations(parser, given)
    require(("transformers",), "hf", "mstpass plan")
    require(("rich",), "viz", "mstpass plan")
    if given.plot is not None:
        require(("matplotlib",), "viz", "mstpass plan --plot")
        _check_picture(parser, given.plot)
    # These import transformers and rich, which are optional.
    from mstpass.planner.background import usable_cores
    from mstpass.planner.models import ModelError
    from mstpass.planner.plan import plan
    from mstpass.planner.terminal_table import show

    try:
        request = _request(given)
        with _progress(pieces(request)) as report:
            planned = plan(request, report, processes=usable_cores())
    except ModelError as error:
        print(f"mstpass plan: {error}", file=sys.stderr)
        return BAD_INPUT
    if given.plot is not None:
        from mstpass.planner.picture import draw

        draw(planned, given.plot)
    if given.json:
        print(_json_text(planned))
    else:
        show(planned)
    return FITS if planned.own.fits else FAILED


def _json_text(planned: TrainingPlan) -> str:
    data = {**dataclasses.asdict(planned), "fits": planned.own.fits}
    del data["sizes"]["each"]  # a number for each tensor of the model
    return json.dumps(data, indent=1)


# ---- arguments ---------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mstpass plan", _DESCRIPTION, _EXAMPLES)
    _add_step(parser.add_argument_group("model, device and step"))
    _add_training(parser.add_argument_group("training"))
    _add_comparison(parser.add_argument_group("allocator, and the rows to compare with"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw the longest sequence against the memory of the device ({_PICTURES})",
    )
    return parser


def _add_step(group: Any) -> None:
    add = group.add_argument
    add("--model", required=True, help="a name such as llama3-8b, or the path of a config.json")
    add_gpu(group)
    add(
        "--device-memory",
        dest="device_bytes",
        type=byte_size,
        metavar="SIZE",
        help="such as 80GiB; required without --gpu (default: that of --gpu)",
    )
    add(
        "--overhead",
        dest="overhead_bytes",
        type=byte_size,
        default=_OVERHEAD,
        metavar="SIZE",
        help="device memory that tensors cannot use, such as CUDA's context (default: %(default)s)",
    )
    add("--sequence", dest="length", type=count, metavar="TOKENS", help="plan this sequence length")
    add("--batch", type=count, default=1, help="sequences on one device (default: %(default)s)")
    add(
        "--attention",
        choices=ATTENTIONS,
        help="model: the model's own, with the masks that it needs when it is compiled; flash: "
        "FlashAttention-2, which needs none (default: model, with --document flash)",
    )
    add(
        "--document",
        type=count,
        metavar="TOKENS",
        help="tokens of a sequence that are not padding, which attention skips (default: all)",
    )


def _add_training(group: Any) -> None:
    add = group.add_argument
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of weights and activations; autocast has fp32 weights and bf16 matrix products "
        "(default: %(default)s)",
    )
    states = "; ".join(f"{name}: {optimizer.text}" for name, optimizer in OPTIMIZERS.items())
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help=f"{states} (default: %(default)s)")
    add("--master-weights", action="store_true", help="keep an fp32 copy of bf16 weights")
    add(
        "--optimizer-in-backward",
        action="store_true",
        help="use each gradient as soon as it is complete, and free it",
    )
    add(
        "--optimizer-step",
        choices=OPTIMIZER_STEPS,
        default="fused",
        help="foreach, the default of torch.optim, needs temporary values for all parameters at "
        'once; compiled: torch.compile(optimizer.step, backend="mst") (default: %(default)s)',
    )
    add(
        "--sharding",
        choices=(*SHARDINGS, "fsdp"),
        default="none",
        help="fsdp is zero3 (default: %(default)s)",
    )
    add(
        "--ranks",
        type=count,
        default=1,
        help="devices that share the sharded parts (default: %(default)s)",
    )


def _add_comparison(group: Any) -> None:
    add = group.add_argument
    add(
        "--allocator",
        choices=ALLOCATORS,
        default=EXPANDABLE,
        help="expandable: PyTorch's allocator with expandable_segments:True, which leaves no gaps; "
        "caching: its default, with simulated gaps (default: %(default)s)",
    )
    add(
        "--logits",
        choices=LOGITS,
        default="model",
        help="of the eager rows; fp32: cast to float32, as transformers did before 4.45 "
        "(default: %(default)s)",
    )
    add(
        "--outputs",
        choices=OUTPUTS,
        default="held",
        help="of the eager rows; held: the loop keeps the model's outputs until backward is over, "
        "as `outputs = model(...)` does (default: %(default)s)",
    )
    add(
        "--offload",
        action="store_true",
        help="saved values of mst's row may wait in host memory, as with the option host_budget",
    )
    add(
        "--host-memory",
        type=byte_size,
        metavar="SIZE",
        help=f"how much of it, for one device (default: {_HOST_MEMORY}); needs --offload",
    )
    add("--alone", action="store_true", help="plan mst's row only, which is faster")


def _check_combinations(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program with a message if arguments contradict each other."""
    if given.device_bytes is None and given.gpu is None:
        parser.error("--gpu or --device-memory is required: say how much memory the device has")
    if given.document is not None and given.attention == MODEL:
        parser.error("--document needs --attention flash, which skips padding")
    if given.host_memory is not None and not given.offload:
        parser.error("--host-memory is of use only with --offload")
    if given.plot is not None and given.length is not None:
        parser.error("--plot draws the longest sequence; leave out --sequence")
    if given.sharding != "none" and given.ranks < 2:
        parser.error(f"--sharding {given.sharding} needs --ranks of at least 2")
    if given.optimizer_in_backward and given.sharding != "none":
        parser.error("--optimizer-in-backward works only with --sharding none")
    if given.master_weights and given.dtype != "bf16":
        parser.error("--master-weights needs --dtype bf16: other weights are fp32 already")
    if given.optimizer_step == "foreach" and not OPTIMIZERS[given.optimizer].temporaries:
        parser.error(
            "--optimizer-step foreach works only with AdamW optimizers, not with "
            f"--optimizer {given.optimizer}"
        )


def _check_picture(parser: argparse.ArgumentParser, path: Path) -> None:
    """End the program with a message if the picture could not be written."""
    if path.suffix.lower() not in _PICTURES.split(", "):
        parser.error(f"--plot {path}: choose a name that ends in one of {_PICTURES}")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        parser.error(f"--plot {path}: cannot write this file: {error.strerror}")
    if is_new:
        path.unlink()


def _request(given: argparse.Namespace) -> Request:
    if given.sharding == "fsdp":
        given.sharding = "zero3"
    if given.attention is None:
        given.attention = MODEL if given.document is None else FLASH
    if given.device_bytes is None:
        given.device_bytes = gpu(given.gpu).memory_bytes
    return Request(
        **_values_of(Request, given),
        training=Training(**_values_of(Training, given)),
        curves=given.plot is not None,
        host_bytes=(given.host_memory or byte_size(_HOST_MEMORY)) if given.offload else 0,
    )


def _values_of(kind: type[Any], given: argparse.Namespace) -> dict[str, Any]:
    """The arguments that are attributes of a dataclass."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(given).items() if name in names}


@contextlib.contextmanager
def _progress(pieces: Mapping[str, float]) -> Iterator[Report]:
    """A progress bar of some pieces of work, which vanishes at the end."""
    # rich is optional
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TimeElapsedColumn

    finished = dict.fromkeys(pieces, 0.0)
    columns = (SpinnerColumn(), "planning", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with progress_bar(*columns, "{task.description}", transient=True) as bar:
        task = bar.add_task("", total=sum(pieces.values()))

        def show(piece: str, done: float, what: str) -> None:
            finished[piece] = done
            completed = sum(share * finished[name] for name, share in pieces.items())
            bar.update(task, completed=completed, description=f"{piece}: {what}" if what else "")

        yield show
