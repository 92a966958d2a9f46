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


def is_same(problem, other):
    """Whether two problems differ in nothing but names."""
    from mstpass.problem.names import UNFINISHED, renamed

    values, others = (
        {value.name: value for value in (*p.values, *p.backward)} for p in (problem, other)
    )
    names = dict(zip(values, others, strict=True))

    def name_of(name):
        node = name.removesuffix(UNFINISHED)  # of a loop's buffer that stands for a node
        return names.get(node, node) + name[len(node) :]

    return (
        len(problem.values) == len(other.values)
        and [v.renamed(name_of, name=name_of(v.name)) for v in values.values()]
        == [*others.values()]
        and renamed(problem.regions, name_of) == other.regions
        and set(map(name_of, problem.gradients)) == set(other.gradients)
        and set(map(name_of, problem.torch_saved or ())) == set(other.torch_saved or ())
        and tuple(map(name_of, problem.outputs)) == other.outputs
    )


# ---- functions that run in a process of their own --------------------------------------------
def squared(number):
    return number**2


def refuse(number):
    from mstpass.errors import UserError

    raise UserError(f"{number} is refused")


def divide_by_zero(number):
    return number / 0


def end_at_once(*given):
    import os

    os._exit(3)


def sleep_long(number):
    import time

    time.sleep(number)
