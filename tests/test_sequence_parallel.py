"""One sequence on several ranks: gradients of one process, and what is refused.

Gradients are compared with one process on the whole batch, in float32, after they are added up over
the ranks. Most cases share one group of processes: those would start once for each test.
"""

from __future__ import annotations

import pytest
import torch

from mstpass.sequences.batch import documents_of
from mstpass.sequences.rules import PADDING, Rules, attend, mask_of
from mstpass.sequences.ulysses import copies_of_kv_heads
from tests.ranks.launch import Found, run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed"),
]
TOLERANCE = 1e-5
# compiled, or about the batch alone and in eager mode
ALWAYS = (
    *("llama", "plain", "packed", "ring", "fully_sharded", "one_key_value_head"),
    *("padded_left", "few_labels", "no_labels", "accumulated"),
    *("groups_of_heads", "groups_of_odd_heads", "encoder_with_own_loss"),
)
OTHERS = (
    *("window", "sinks", "checkpointed", "latent", "plain_ring"),
    *("more_ranks_than_heads", "ring_of_encoder", "softcap", "encoder", "experts"),
    *("odd_key_value_heads", "all_heads", "learned_positions", "padded_right", "embedded"),
    *("groups_that_share_a_head", "groups_with_sinks", "groups_of_documents"),
    "groups_with_dropout",
)
FOUR = (
    "llama",
    "one_key_value_head",
    "packed",
    "padded_left",
    "encoder",
    "ring",
    "more_ranks_than_heads",
    "latent",
    "of_a_mesh",
    "ring_of_rows",
    "ring_of_rows_in_groups",
)
# what is refused, and a part of the reason: both sides, and what to change
REFUSED = {
    "no transformers": "sequence_parallel_attention",
    "heads": "1 attention heads do not divide among 2 ranks",
    "method": "one of auto, ulysses, ring, not 'rings'",
    "groups": "4 attention heads on 2 ranks are 2 a rank, which do not divide into head_groups=4",
    "number of groups": "head_groups is a number of groups of heads, not 0",
    "groups in a ring": "head_groups=2 is for Ulysses, and method='ring' exchanges no heads",
    "method of a mesh": "a mesh of two dims has both methods",
    "heads of a mesh": "1 attention heads do not divide among 2 ranks",
    "window in a mesh": "a window, which ring attention does not know",
    "window in a ring": "Ulysses takes 4 heads on 2 ranks: leave method='ring' out",
    "group": "a process group, a device mesh, or None for all ranks, not 2",
    "documents in a ring": "documents or padding that need a mask",
    "loss of a sequence": "ForSequenceClassification, is not one of separate tokens",
    "attention": "AttentionInterface",
    "layer types": "layers of type conv",
    "cache": "use_cache was given",
    "mask of a part": "give the mask of the whole batch to mstpass.shard_sequence",
    "batch of a part": "give the model all that mstpass.shard_sequence returns",
    "tokens alone": "got no position_ids, and each rank would number its tokens from 0",
    "padding on the left": "row 0 begins with tokens 0 that have no labels",
    "labels of other tokens": "[2, 36], and one for each token is needed, [2, 37]",
    "a tensor": "a mapping of names to tensors, not a Tensor",
    "other batches": "2 x 37 and 2 x 36 tokens",
    "mask of four dims": "[2, 1, 37, 37]",
    "positions of three dims": "[3, 2, 37]",
    "nothing": "input_ids [B, S] or inputs_embeds",
    "gradients": "'mean' or 'sum', not 'max'",
    "key-value heads": "key-value heads divide the heads of queries",
    "lengths": "as many keys and values as queries",
    "dims": "takes [B, heads, S / R, D]",
    "documents": "let mstpass.shard_sequence make the batch",
}


def _are_right(found: Found) -> None:
    for case, results in found.items():
        for result in results:
            assert result["error"] < TOLERANCE, (case, result)
            assert result.get("loss", 0.0) < TOLERANCE, (case, result)
            assert result.get("graphs", 1) == 1, (case, result)


@pytest.mark.slow
def test_two_ranks() -> None:
    found = run_ranks("sequence_parallel", [*ALWAYS, "refusals"], kernels=["plain"])
    for refused in found.pop("refusals"):
        assert refused.keys() == REFUSED.keys()
        for about, part in REFUSED.items():
            assert part in refused[about], (about, refused[about])
    for result in found["encoder_with_own_loss"]:
        assert "leave labels out" in result["refused"]
    _are_right(found)


@pytest.mark.full
def test_other_models_and_batches() -> None:
    _are_right(run_ranks("sequence_parallel", OTHERS))


@pytest.mark.full
def test_four_ranks() -> None:
    _are_right(run_ranks("sequence_parallel", FOUR, ranks=4))


# ---- in one process ------------------------------------------------------------------------------
SHAPE = (1, 6)


def _documents(causal: bool = True, **batch: list[int]) -> list[int] | None:
    found = documents_of({k: torch.tensor([x]) for k, x in batch.items()}, SHAPE, causal)
    return None if found is None else found[0].tolist()


def test_no_documents_where_attention_needs_none() -> None:
    assert _documents() is None
    assert _documents(position_ids=[3, 4, 5, 6, 7, 8]) is None
    assert _documents(attention_mask=[1, 1, 1, 1, 1, 1]) is None
    assert _documents(attention_mask=[1, 1, 1, 0, 0, 0]) is None  # no token sees what is behind it
    assert _documents(causal=False, attention_mask=[1, 1, 1, 1, 1, 1]) is None


def test_documents_of_positions_and_numbers() -> None:
    assert _documents(position_ids=[0, 1, 0, 1, 2, 0]) == [0, 0, 1, 1, 1, 2]
    assert _documents(seq_idx=[0, 0, 4, 4, 4, 5]) == [0, 0, 4, 4, 4, 5]
    lengths = torch.tensor([0, 2, 5, 6])
    found = documents_of({"cu_seq_lens_q": lengths}, SHAPE, True)
    assert found is not None and found[0].tolist() == [0, 0, 1, 1, 1, 2]


def test_documents_of_padding() -> None:
    left = _documents(attention_mask=[0, 0, 1, 1, 1, 1])
    assert left == [PADDING, PADDING, 0, 0, 0, 0]
    for padded in ([0, 0], [1, 1], [7, 8]):  # as collators number it
        numbered = _documents(attention_mask=[0, 0, 1, 1, 1, 1], position_ids=[*padded, 0, 1, 2, 3])
        assert numbered == left
    both = _documents(attention_mask=[1, 1, 1, 1, 1, 0], position_ids=[0, 1, 0, 1, 2, 0])
    assert both == [0, 0, 1, 1, 1, PADDING]
    encoder = _documents(causal=False, attention_mask=[1, 1, 1, 1, 0, 0])
    assert encoder == [0, 0, 0, 0, PADDING, PADDING]


def test_documents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one for each token is needed, \[1, 6\]"):
        documents_of({"attention_mask": torch.ones(1, 1, 6, 6)}, SHAPE, True)
    with pytest.raises(ValueError, match="ends at 5, and the batch has 1 rows of 6 tokens"):
        documents_of({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, SHAPE, True)


@pytest.mark.parametrize("causal", [True, False])
def test_masks(causal: bool) -> None:
    """Against the definition, token by token."""
    documents = torch.tensor([[0, 0, 0, 1, 1, PADDING], [2, 2, 2, 2, 2, 2]])
    mask = mask_of(Rules(causal, window=2, documents_BS=documents), torch.zeros(2, 1, 6, 4))
    assert mask is not None
    for b in range(2):
        for i in range(6):
            for j in range(6):
                near = i - j < 2 and (causal or j - i < 2)
                seen = near and (j <= i or not causal) and bool(documents[b, i] == documents[b, j])
                assert bool(mask[b, 0, i, j]) is seen
    assert mask_of(Rules(causal, window=6), torch.zeros(2, 1, 6, 4)) is None


@pytest.mark.parametrize("window", [None, 3])
def test_sinks(window: int | None) -> None:
    """A score more in each row of the softmax, of a value that is 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    found = attend(q, k, v, Rules(window=window, sinks_H=sinks))
    place = torch.arange(6)
    before = place[:, None] - place[None]
    hidden = (before < 0) | (before >= (window or 6))
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(hidden, float("-inf"))
    with_sink = torch.cat((scores, sinks[None, :, None, None].expand(2, 4, 6, 1)), -1)
    right = with_sink.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    assert torch.allclose(found, right, atol=1e-12)
    of_found, of_right = (torch.autograd.grad(x.sin().sum(), sinks)[0] for x in (found, right))
    assert torch.allclose(of_found, of_right, atol=1e-12)


def test_a_soft_cap_with_sinks_is_refused() -> None:
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="a soft cap and sinks"):
        attend(x, x, x, Rules(softcap=1.0, sinks_H=torch.zeros(2)))


def test_key_value_heads_are_repeated_no_more_than_is_needed() -> None:
    for heads in range(1, 25):
        for kv_heads in (k for k in range(1, heads + 1) if heads % k == 0):
            for ranks in (r for r in range(1, heads + 1) if heads % r == 0):
                copies = copies_of_kv_heads(heads, kv_heads, ranks)
                assert (heads // kv_heads) % copies == 0 and kv_heads * copies % ranks == 0
                assert kv_heads % ranks or copies == 1
