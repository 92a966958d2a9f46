"""The token rules of collectives, checked on numbers that two ranks exchange."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from mstpass.graph import ops
from mstpass.graph.joint import tensors_of
from mstpass.graph.tokens import Refusal
from tests import test_token_rules
from tests.token_rule_cases import COLLECTIVES

_call = test_token_rules._call


def _call_and_wait(node: fx.Node, values: dict[fx.Node, Any], **replaced: Any) -> Any:
    # 2.11 wants contiguous operands, which Inductor sees to
    result = _call(node, {n: value.contiguous() for n, value in values.items()}, **replaced)
    for tensor in tensors_of(result):
        torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def token_rules(mesh: DeviceMesh) -> dict[str, Any]:
    """Run each collective on chunks in every way that its rule allows; the error if one differs."""
    test_token_rules._call = _call_and_wait
    torch.manual_seed(dist.get_rank())  # each rank gives numbers of its own
    taken = {}
    for given in COLLECTIVES:
        if given.target is torch.ops._dtensor.shard_dim_alltoall.default:
            continue  # gloo lacks it
        node, values = test_token_rules._node(given)
        for spec in given.specs:
            test_token_rules._run_chunks(node, values, spec)
        others = [s for s in test_token_rules._all_specs(3) if s not in given.specs]
        refused = all(isinstance(ops.operand_specs(node, s), Refusal) for s in others)
        taken[str(given.target)] = refused
    return {"taken": taken}
