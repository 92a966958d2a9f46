"""Attention in groups of heads: the exchange of one group behind the computation of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import mstpass
from mstpass.graph.collectives import is_collective, is_wait
from mstpass.sequences.ulysses import Groups

if not torch.distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition

from mstpass.torch_internals.pretended_ranks import pretended_ranks


def _joint_graph(heads: int, kv_heads: int, groups: int) -> fx.Graph:
    """The forward and the backward of a rank's attention, as they are traced."""
    found: list[fx.Graph] = []

    def keep(module: fx.GraphModule, *args: Any, **how: Any) -> Any:
        found.append(module.graph)
        return default_partition(module, *args, **how)

    run = lambda module, _: make_boxed_func(module.forward)
    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=keep)
    q, k, v = (torch.randn(1, n, 8, 8, requires_grad=True) for n in (heads, kv_heads, kv_heads))

    def attention(*parts: torch.Tensor) -> torch.Tensor:
        how = {"is_causal": True, "head_groups": groups}
        return mstpass.sequence_parallel_attention(*parts, **how).sum()

    with pretended_ranks(2, 0):
        torch.compile(attention, backend=backend, fullgraph=True)(q, k, v).backward()
    (graph,) = found
    return graph


def _on_their_way(graph: fx.Graph) -> list[int]:
    """At each attention, how many exchanges have begun that are waited for behind it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    waits = {node.all_input_nodes[0]: node for node in graph.nodes if is_wait(node)}
    begun = [node for node in graph.nodes if is_collective(node)]
    assert set(begun) == waits.keys()
    attention = [node for node in graph.nodes if "scaled_dot_product" in str(node.target)]
    return [sum(place[x] < place[a] < place[waits[x]] for x in begun) for a in attention]


def test_exchanges_are_on_their_way_while_a_group_computes() -> None:
    # in the forward the queries of the next group, and what the one before has mixed
    forward = [1, 2, 2, 1]
    # in the backward attention and its gradients; all groups have the same keys and values
    backward = [1, 1, 2, 2, 2, 2, 1, 1]
    assert _on_their_way(_joint_graph(8, 2, 4)) == [*forward, *backward]


def test_one_group_waits_for_its_exchanges() -> None:
    assert _on_their_way(_joint_graph(8, 2, 1)) == [0, 0]


def test_the_free_plan_of_groups_needs_no_more_memory_than_inductor() -> None:
    def attention(*parts: torch.Tensor) -> torch.Tensor:
        how: Any = {"is_causal": True, "head_groups": 4}
        return mstpass.sequence_parallel_attention(*parts, **how).sum()

    options = {"memory_budget": "free"}
    with pretended_ranks(4, 3), torch.device("meta"):
        parts = [torch.empty(1, n, 1024, 64, requires_grad=True) for n in (16, 8, 8)]
        report = mstpass.explain(attention, *parts, options=options, device="cuda", gpu="h100")
    assert report.peak_bytes is not None and report.baseline_peak_bytes is not None
    assert report.peak_bytes <= report.baseline_peak_bytes


def test_groups_share_keys_and_values_where_they_divide() -> None:
    x_BKSD = torch.arange(3.0).reshape(1, 3, 1, 1)
    assert (Groups.of(4, 2).of_keys, Groups.of(4, 2).sharing) == (2, 2)
    assert Groups.of(2, 4).sharing == 1
    pieces = [Groups.of(2, 3).heads_of(x_BKSD, i).flatten().tolist() for i in (0, 1)]
    assert pieces == [[0, 0, 1], [1, 2, 2]], "three heads for two groups, each of them twice"
    sent = Groups.of(4, 2).parts([torch.zeros(1, 2, 4, 1, 1)], [torch.zeros(1, 2, 2, 1, 1)])
    assert [len(parts) for parts in sent] == [2, 1, 2, 1]
