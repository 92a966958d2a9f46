"""Models for the planner's tests: the ``config.json`` of a tiny Llama, and sizes by name."""

from __future__ import annotations

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def plan_sizes(name):
    """The numbers of parameters of a model, by name or path."""
    from mstpass.planner.models import build, config_of, sizes_of
    from mstpass.planner.training import Training
    from mstpass.torch_internals.fake_tensors import FakeTensorMode

    with FakeTensorMode():
        return sizes_of(build(config_of(name), Training()))
