"""Find the longest sequence that a training step can have on a device, or with
--sequence the cheapest plan that fits. The step is traced on fake tensors, so
neither a GPU nor weights are needed. The table also shows what eager mode,
checkpointing, Inductor and the MST recipe need. With --gpus it is about one
of them, which may share weights, gradients, states and each sequence.

examples:
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit
  mstpass plan --model llama3-8b --gpu h200 --sequence 65536
  mstpass plan --model llama3-70b --device-memory 80GiB \\
               --sharding zero3 --gpus 16 --alone
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit \\
               --gpus 8 --sharding fsdp --sequence-parallel
  mstpass plan --model llama3-8b --gpu 4090 --lora 16 --weights nf4 --alone
  mstpass plan --model llama3.2-1b --gpu h100 --search batch,length,recompute
  mstpass plan --model llama3-8b --device-memory 80GiB --optimizer adamw-8bit \\
               --offload --host-memory 256GiB
  mstpass plan --model path/to/config.json --device-memory 24GiB --json

exit codes: 0 it fits, 1 it does not fit or its step cannot be traced,
2 wrong arguments
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from mstpass.argument_parsers import add_gpu, byte_size, command_parser, count
from mstpass.gpus import gpu
from mstpass.planner import request, training

_PICTURES = ".png, .svg, .pdf"
_HOST_MEMORY = "128GiB"
_BEST = 0  # number of ranks that share a sequence: the best one


def parser_of_plan() -> argparse.ArgumentParser:
    parser = command_parser("mstpass plan", __doc__)
    _add_step(parser.add_argument_group("model, device and step"))
    _add_training(_Options(parser.add_argument_group("training")))
    _add_adapters(_Options(parser.add_argument_group("adapters")))
    _add_ranks(_Options(parser.add_argument_group("several GPUs")))
    _add_comparison(parser.add_argument_group("host memory, and the rows to compare with"))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    text = f"draw the longest sequence against the memory of the device ({_PICTURES})"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    return parser


class _Options:
    """Adds options that are attributes of `Request` or `Training`.

    Flag, type, choices and default are the attribute's.
    """

    def __init__(self, group: Any):
        self._group = group
        kinds = map(dataclasses.fields, (request.Request, training.Training))
        self._fields = {field.name: field for fields in kinds for field in fields}
        self._choices = {**request.CHOICES, **training.CHOICES}

    def __call__(self, name: str, text: str, *flags: str, **more: Any) -> None:
        """Add an option; its help ends with the default, unless the text has the word.

        Args:
            flags: in the place of the one that is the attribute's name.
        """
        field = self._fields[name]
        known = {} if field.default is dataclasses.MISSING else {"default": field.default}
        if field.type == "bool":
            known["action"] = "store_true"
        elif str(field.type).startswith("int"):
            known["type"] = count
        else:
            known["choices"] = self._choices.get(name)
        given = {**known, **more}
        if given.get("default") and "default" not in text:
            text = f"{text} (default: %(default)s)".lstrip()
        flags = flags or (f"--{name.replace('_', '-')}",)
        self._group.add_argument(*flags, dest=name, help=text, **given)


def _add_step(group: Any) -> None:
    add = _Options(group)
    model = "a name such as llama3-8b, or the path of a config.json"
    add("model", model, required=True)
    add_gpu(group)
    memory = "such as 80GiB; required without --gpu (default: that of --gpu)"
    size: dict[str, Any] = {"type": byte_size, "metavar": "SIZE"}
    add("device_bytes", memory, "--device-memory", **size)
    overhead = "device memory that tensors cannot use, such as CUDA's context"
    add("overhead_bytes", overhead, "--overhead", default=request.OVERHEAD, **size)
    add("length", "plan this sequence length", "--sequence", metavar="TOKENS")
    add(
        "search",
        f"choose these, some of {','.join(request.SEARCHED)}, by the most tokens per second that "
        f"fit; with {request.LENGTH} among them, --sequence is the shortest length (default of "
        f"it: {request.SHORTEST:,})",
        type=_searched,
        metavar="NAMES",
    )
    add("batch", "sequences on one device")
    add(
        "attention",
        "model: the model's own, with the masks that it needs when it is compiled; flash: "
        "FlashAttention-2, which needs none (default: model, with --document flash)",
        default=None,
    )
    document = "tokens of a sequence that are not padding, which attention skips (default: all)"
    add("document", document, metavar="TOKENS")


def _searched(text: str) -> frozenset[str]:
    """Names such as ``batch,length``."""
    names = frozenset(text.split(","))
    if not names <= {*request.SEARCHED}:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(request.SEARCHED)}")
    return names


def _add_training(add: _Options) -> None:
    add(
        "dtype",
        "of weights and activations; autocast has fp32 weights and bf16 matrix products",
    )
    states = (f"{name}: {optimizer.text}" for name, optimizer in training.OPTIMIZERS.items())
    add("optimizer", "; ".join(states))
    add("master_weights", "keep an fp32 copy of bf16 weights")
    add("optimizer_in_backward", "use each gradient as soon as it is complete, and free it")
    add(
        "optimizer_step",
        "foreach, the default of torch.optim, needs temporary values for all parameters at once; "
        'compiled: torch.compile(optimizer.step, backend="mst") (default: %(default)s)',
    )


def _add_adapters(add: _Options) -> None:
    add("lora", "train adapters of this rank, beside frozen weights (peft)", metavar="RANK")
    target = "linear layers with adapters, such as q_proj,v_proj (default: all but the head)"
    add("target", target, metavar="NAMES")
    add(
        "weights",
        "of frozen linear layers; nf4: in 4 bits (bitsandbytes), needs --lora (default: "
        "%(default)s, of --dtype)",
    )


def _add_ranks(add: _Options) -> None:
    add("sharding", "fsdp is zero3", choices=(*training.CHOICES["sharding"], "fsdp"))
    add("ranks", "devices, which share the sharded parts", "--gpus", "--ranks", metavar="N")
    add(
        "head_groups",
        "of ranks that exchange heads: in so many groups, one after the other (default: of "
        f"{', '.join(map(str, request.GROUPS))} the fewest with which --sequence fits, or without "
        "it those that lead to the longest sequence)",
        default=None,
        metavar="N",
    )
    add(
        "sequence_ranks",
        "ranks that share each sequence, as mstpass.sequence_parallel does; without a number, "
        "the best one: of the longest sequence or, with --sequence, of the most tokens per second",
        "--sequence-parallel",
        nargs="?",
        const=_BEST,
        metavar="RANKS",
    )


def _add_comparison(group: Any) -> None:
    add = _Options(group)
    add(
        "logits",
        "of the eager rows; fp32: cast to float32, as transformers did before 4.45; chunked: "
        "in tiles, once more in the backward, as in TRL's chunked_nll",
    )
    add(
        "outputs",
        "of the eager rows; held: the loop keeps the model's outputs until backward is over, "
        "as `outputs = model(...)` does",
    )
    add(
        "mlp_tiles",
        "of the MST recipe; kept: backward holds what all tiles of an MLP need; again: it "
        "computes each tile once more, as ALST does",
    )
    offload = (
        "saved values of mst's row may wait in host memory, as with the option host_budget, and so "
        "do inputs of layers that eager rows checkpoint"
    )
    group.add_argument("--offload", action="store_true", help=offload)
    memory = f"how much of it, for one device (default: {_HOST_MEMORY}); needs --offload"
    group.add_argument("--host-memory", type=byte_size, metavar="SIZE", help=memory)
    add("alone", "plan mst's row only, which is faster")


def check_combinations(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program with a message if arguments contradict each other."""
    if given.device_bytes is None and given.gpu is None:
        parser.error("--gpu or --device-memory is required: say how much memory the device has")
    if given.document is not None and given.attention == training.MODEL:
        parser.error("--document needs --attention flash, which skips padding")
    if given.host_memory is not None and not given.offload:
        parser.error("--host-memory is of use only with --offload")
    if given.plot is not None and given.length is not None:
        parser.error("--plot draws the longest sequence; leave out --sequence")
    if given.sharding != "none" and given.ranks < 2:
        parser.error(f"--sharding {given.sharding} needs --gpus of at least 2")
    if not given.lora and (given.weights != training.AS_MODEL or given.target != training.ALL):
        parser.error("--weights nf4 and --target need --lora: without it, all weights are trained")
    if given.search:
        _check_search(parser, given)
    _check_sequences(parser, given)
    if given.optimizer_in_backward and given.sharding != "none":
        parser.error("--optimizer-in-backward works only with --sharding none")
    if given.master_weights and given.dtype != "bf16":
        parser.error("--master-weights needs --dtype bf16: other weights are fp32 already")
    if given.optimizer_step == "foreach" and not training.OPTIMIZERS[given.optimizer].temporaries:
        parser.error(
            "--optimizer-step foreach works only with AdamW optimizers, not with "
            f"--optimizer {given.optimizer}"
        )


def _check_search(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """The same for a search."""
    if request.LENGTH not in given.search and given.length is None:
        parser.error(f"--search without {request.LENGTH} needs --sequence: the length to plan")
    if request.BATCH in given.search and given.batch != 1:
        parser.error(f"--search {request.BATCH} chooses the batch: leave out --batch")
    if given.sequence_ranks == _BEST:
        parser.error(
            "--search needs the number of ranks that share a sequence: --sequence-parallel RANKS"
        )
    if given.plot is not None:
        parser.error("--plot draws the longest sequence; leave out --search")


def _check_sequences(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """The same for ranks that share sequences."""
    if given.sequence_ranks == 1:
        if given.head_groups is not None:
            parser.error("--head-groups needs --sequence-parallel: ranks exchange these heads")
        return
    if given.ranks < 2:
        parser.error("--sequence-parallel needs --gpus of at least 2: ranks share each sequence")
    if given.sequence_ranks != _BEST and given.ranks % given.sequence_ranks:
        parser.error(
            f"--sequence-parallel {given.sequence_ranks} does not divide --gpus {given.ranks}: "
            "each GPU is in one group of ranks that share a sequence"
        )
    if given.attention == training.FLASH or given.document is not None:
        parser.error(
            "--sequence-parallel has an attention of its own, which exchanges between ranks: leave "
            "out --attention flash and --document"
        )


def check_picture(parser: argparse.ArgumentParser, path: Path) -> None:
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


def request_of(given: argparse.Namespace) -> request.Request:
    if given.sharding == "fsdp":
        given.sharding = "zero3"
    if given.attention is None:
        given.attention = training.MODEL if given.document is None else training.FLASH
    if given.device_bytes is None:
        given.device_bytes = gpu(given.gpu).memory_bytes
    split = given.sequence_ranks == _BEST
    groups = given.sequence_ranks != 1 and given.head_groups is None and not given.search
    given.sequence_ranks = max(1, given.sequence_ranks)
    given.head_groups = given.head_groups or 1
    return request.Request(
        **_values_of(request.Request, given),
        split=split,
        groups=groups,
        training=training.Training(**_values_of(training.Training, given)),
        curves=given.plot is not None,
        host_bytes=(given.host_memory or byte_size(_HOST_MEMORY)) if given.offload else 0,
    )


def _values_of(kind: type[Any], given: argparse.Namespace) -> dict[str, Any]:
    """The arguments that are attributes of a dataclass."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(given).items() if name in names}
