"""The table of probes: one for each part of torch's private APIs that mstpass uses.

A *probe* asks an installed torch whether APIs are there: their names and the names of their
parameters. What they do is checked in the tests (tests/torch_probes/), but for Inductor's hooks:
where a compilation goes wrong, `check_hooks` asks whether this torch calls them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mstpass.torch_internals.aot_autograd import min_cut_rematerialization_partition
from mstpass.torch_internals.batch_sizes import tracing
from mstpass.torch_internals.inductor import (
    CustomGraphPass,
    CustomPartitionerFn,
    CustomSchedulerPass,
    compile_fx,
)
from mstpass.torch_internals.versions import expect, find

LOST = {
    "loops": "every step compiles as under Inductor",
    "schedule": "budgets are held to simulated peaks, and the order of kernels is not checked",
    "linter": "no step is linted",
    "traces": "the explainer, the planner and the linter trace no step of FSDP2",
    "speed": "a step that is explained for another device than its own is traced in more time",
    "sequences": "no sequence is shared by ranks",
    "plans": "no sequence that ranks share is planned",
    "gpu": "no step is planned or compiled for a GPU that is not there",
}
# Of each probe its name, the file of this package that it is for, what is lost where it fails, what
# that part is for, and where in torch the APIs are: a module or class, with what is needed of it.
_TABLE = Path(__file__).with_name("probes.txt").read_text()
# What not every build of torch has; without it there is nothing to ask for.
_APPLIES: dict[str, Callable[[], bool]] = {
    "fsdp_states": torch.distributed.is_available,
    "data_parallel": torch.distributed.is_available,
    "pretended_ranks": torch.distributed.is_available,
}
_COMMA = re.compile(r", (?![^(]*\))")  # none between parameters


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a part of an adapter needs of torch.

    Attributes:
        adapter: the file of mstpass/torch_internals, without ``.py``.
        lost: what mstpass does without it; a key of ``LOST``.
        purpose: what the part is for.
        apis: as versions.py describes them.
    """

    name: str
    adapter: str
    lost: str
    purpose: str
    apis: tuple[str, ...]

    def require(self) -> None:
        """Check that all APIs exist and have their parameters.

        Raises:
            TorchChangedError: one does not.
        """
        for api in self.apis if _APPLIES.get(self.name, lambda: True)() else ():
            find(api)


def _rows() -> Iterator[Probe]:
    for row in re.split(r"\n(?=\w)", _TABLE.strip()):
        head, purpose, *where = re.split(r"\n {4}(?=\w)", row)
        name, adapter, lost = head.split()
        homes = (" ".join(text.split()).split(": ") for text in where)
        apis = [
            f"{home}.{api.replace(' | ', f' | {home}.')}"
            for home, names in homes
            for api in _COMMA.split(names)
        ]
        yield Probe(name, adapter, lost, purpose, tuple(apis))


PROBES = tuple(_rows())


def check_hooks() -> None:
    """Compile a graph of one product: Inductor calls the passes at its hooks.

    Raises:
        TorchChangedError: it does not, or with other arguments.
    """
    wrong: list[str] = []
    called: set[str] = set()

    def hook(name: str, base: type, run: Callable[..., Any]) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            try:
                return run(*args, **kwargs)
            except (AttributeError, TypeError):
                wrong.append(f"{name} is called with other arguments")
                raise

        return type(name, (base,), {"__call__": call, "uuid": lambda self: None})()

    def partition(
        gm: Any, inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any, **_: Any
    ) -> Any:
        names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
        if names != (expected := ["primals_1", "primals_2", "tangents_1"]):
            wrong.append(f"the joint graph's inputs are not named {expected}")
        return min_cut_rematerialization_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs)

    hooks = {
        name: hook(name, base, run)
        for name, base, run in (
            (
                "post_grad_custom_post_pass",
                CustomGraphPass,
                lambda g: g.find_nodes(op="output"),
            ),
            ("custom_partitioner_fn", CustomPartitionerFn, partition),
            ("_pre_fusion_custom_pass", CustomSchedulerPass, lambda kernels: kernels[:]),
        )
    }
    module = fx.symbolic_trace(lambda x, y: (x @ y,))  # for a product alone no kernel is compiled
    with tracing(None), torch.enable_grad():
        x, y = (torch.ones(2, 2, device="cpu", requires_grad=needs) for needs in (True, False))
        try:
            compile_fx(module, [x, y], config_patches=hooks)
        except Exception:
            if not wrong:
                raise
    expect(not wrong, "; ".join(wrong))
    for name in hooks:
        expect(name in called, f"{name} is not called")
