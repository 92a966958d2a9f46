"""FlexAttention in a graph: higher-order ops whose scores and masks are subgraphs.

    out, logsumexp, max_scores = flex_attention(q, k, v, score_mod, block_mask, scale, options,
                                                score_mod_buffers, mask_mod_buffers)
    dq, dk, dv, d_buffers = flex_attention_backward(q, k, v, out, logsumexp, d_out, ...)

They draw no random numbers and write to nothing but their results, so they may run twice.
Source: torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

import torch
from torch import fx

FORWARD = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward
FLEX = frozenset({FORWARD, BACKWARD})


def is_flex_subgraph(node: fx.Node) -> bool:
    """Whether the node is a subgraph that FlexAttention alone calls."""
    return node.op == "get_attr" and all(user.target in FLEX for user in node.users)
