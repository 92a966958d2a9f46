"""The leaves of nested tuples, lists, dicts and whatever else is registered with torch.

A step's arguments and results are such trees; Hugging Face registers its model outputs. Source:
torch/utils/_pytree.py.
"""

from __future__ import annotations

from torch.utils._pytree import tree_leaves, tree_map

from mstpass.torch_internals.private_apis import PrivateApis

__all__ = ["tree_leaves", "tree_map"]

APIS = PrivateApis(
    names=("torch.utils._pytree.tree_leaves", "torch.utils._pytree.tree_map"),
)


def probe() -> None:
    APIS.require()
    tree = {"a": (1, [2]), "b": 3}
    APIS.expect(tree_leaves(tree) == [1, 2, 3], "tree_leaves gives other leaves")
    APIS.expect(tree_map(str, tree) == {"a": ("1", ["2"]), "b": "3"}, "tree_map maps otherwise")
