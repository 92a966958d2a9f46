"""What a compiled model's caller tells transformers: no mask where nothing is packed or padded."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import mstpass
from mstpass import compiling
from mstpass.integrations import transformers_masks

pytestmark = pytest.mark.sampled(6)

transformers = pytest.importorskip("transformers")

N, VOCAB = 48, 100
# of one layer: a layer more has no mask of its own
BASE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": VOCAB}
DECODER = {**BASE, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ENCODER = {**BASE, "num_attention_heads": 4, "pad_token_id": 0}
IDS = torch.randint(3, VOCAB, (2, N), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "labels": IDS}
PIXELS = {"pixel_values": torch.ones(2, 3, 28, 28), "labels": torch.tensor([0, 1])}  # 7 x 7 + 1
PACKED = torch.cat([torch.arange(20), torch.arange(N - 20)]).expand(2, -1)
PADDED = (torch.arange(N) < torch.tensor([[N], [30]])).long()


def _of(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    if name == "ViT":
        sizes = {k: v for k, v in BASE.items() if k != "vocab_size"}
        config = transformers.ViTConfig(
            **sizes, num_attention_heads=4, image_size=28, patch_size=4, num_labels=2
        )
        return transformers.ViTForImageClassification(config)
    if name == "Bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)).eval()
    text = "Text" if name == "Gemma3" else ""
    head = {} if name in ("Llama", "Mistral") else {"head_dim": 8}
    config = getattr(transformers, f"{name}{text}Config")(**DECODER, **TOKENS, **head, **changes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that Dynamo captures; they run as they are."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: object, **_: Any) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    monkeypatch.setattr(compiling, "mst", backend)
    torch._dynamo.reset()  # all models share Module._call_impl, and its limit of recompilations
    return found


def _squares(graphs: list[fx.GraphModule], length: int = N) -> list[str]:
    """The nodes with a value of length x length."""
    return [
        node.name
        for gm in graphs
        for node in gm.graph.nodes
        if isinstance(value := node.meta.get("example_value"), torch.Tensor)
        and sum(size == length for size in value.shape) > 1
    ]


def _gradients(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Qwen3", {}),
        ("Gemma3", {"sliding_window": N + 1}),
        ("Mistral", {"sliding_window": N + 1}),
        ("Bert", {}),
        ("ViT", {}),
    ],
)
def test_no_mask_is_traced(name: str, changes: dict[str, Any], graphs: list[Any]) -> None:
    model = _of(name, **changes)
    batch = PIXELS if name == "ViT" else TEXT
    right = _gradients(model, batch)
    mstpass.compile(model, fullgraph=True)
    torch.testing.assert_close(_gradients(model, batch), right, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1 and not _squares(graphs, 50 if name == "ViT" else N)


@pytest.mark.parametrize(
    ("name", "batch", "changes"),
    [
        ("Llama", {"position_ids": PACKED}, {}),
        ("Llama", {"position_ids": torch.arange(N).expand(2, -1)}, {}),
        ("Llama", {"attention_mask": PADDED}, {}),
        ("Llama", {"attention_mask": PADDED, "position_ids": PACKED}, {}),
        ("Mistral", {}, {"sliding_window": N - 1}),
        ("Mistral", {"position_ids": PACKED}, {"sliding_window": N}),
        ("Bert", {"attention_mask": PADDED}, {}),
    ],
    ids=["packed", "not packed", "padded", "both", "window", "window, packed", "encoder"],
)
def test_other_masks_are_those_of_eager(
    name: str, batch: dict[str, Any], changes: dict[str, Any], graphs: list[Any]
) -> None:
    """After a call that needs none, so that a graph without a mask exists already."""
    model = _of(name, **changes)
    right = _gradients(model, TEXT), _gradients(model, {**TEXT, **batch})
    mstpass.compile(model, fullgraph=True)
    for given, values in zip((TEXT, {**TEXT, **batch}, TEXT), (*right, right[0]), strict=True):
        torch.testing.assert_close(_gradients(model, given), values, rtol=1e-4, atol=1e-5)
    assert _squares(graphs[-1:])


def test_positions_may_have_no_name(graphs: list[Any]) -> None:
    model = _of("Llama")
    right = model(IDS, None, PACKED).logits
    mstpass.compile(model, fullgraph=True)
    torch.testing.assert_close(model(IDS, None, PACKED).logits, right, rtol=1e-4, atol=1e-5)
    model(IDS)
    assert len(graphs) == 2 and _squares(graphs[:1]) and not _squares(graphs[1:])


def test_the_model_stays_what_it_was(graphs: list[Any]) -> None:
    model: Any = _of("Llama")
    before = model.config.to_dict()
    mstpass.compile(model)
    model(**TEXT)
    assert model.config.to_dict() == before and not model._forward_pre_hooks
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._compiled_call_impl is None
    graphs.clear()
    right = _gradients(_of("Llama"), TEXT)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(_gradients(model, TEXT), right, rtol=1e-4, atol=1e-5)
    assert _squares(graphs)  # eager attention has products of N x N
    assert mstpass.uncompile(model)._compiled_call_impl is None


def test_generation(graphs: list[Any]) -> None:
    model = _of("Llama").eval()
    given = {"max_new_tokens": 4, "do_sample": False, "attention_mask": PADDED.flip(1)}
    right = model.generate(IDS, use_cache=True, **given)  # type: ignore[operator]
    mstpass.compile(model)
    assert torch.equal(model.generate(IDS, use_cache=True, **given), right)  # type: ignore[operator]


def test_other_calls_are_not_told() -> None:
    """Neither another thread, nor a later call, nor a model that is not compiled."""
    model, other = mstpass.compile(_of("Llama")), _of("Llama")
    find = transformers.masking_utils.find_packed_sequence_indices
    seen: list[Any] = []

    def look(*_: Any) -> None:
        thread = threading.Thread(target=lambda: seen.append(find(PACKED)))
        thread.start()
        thread.join()

    def failing(*_: Any, **__: Any) -> None:
        look()
        seen.append(find(PACKED))
        raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        transformers_masks.says_whether_packed(model, failing, model.forward)(IDS)
    seen.append(find(PACKED))
    elsewhere, within, after = seen
    assert elsewhere is not None and after is not None and within is None
    packed = other(IDS, position_ids=PACKED).logits
    assert not torch.allclose(packed, other(IDS).logits)


def test_others_are_left_alone() -> None:
    def function() -> None: ...

    vision = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "num_hidden_layers": 1}
    mixed = transformers.Gemma3Config(
        text_config={**DECODER, "head_dim": 8},
        vision_config={**vision, "num_attention_heads": 2, "intermediate_size": 32},
        mm_tokens_per_image=4,
    )
    for model in (nn.Linear(2, 2), transformers.Gemma3ForConditionalGeneration(mixed)):
        told = transformers_masks.says_whether_packed(model, function, model.forward)
        assert told is function
