"""Imports go downwards only: a module imports from its own layer or from lower ones."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

from tests.source_files import FILES, ROOT, name_of, parsed

# Lowest first. A layer is a package or a file of ``mstpass``; those in one row may not import each
# other, but for a file and its own package.
LAYERS = (
    ("errors", "integrations", "plain_data", "frame_stack", "progress", "walk"),
    ("gpus",),
    ("torch_internals", "byte_sizes", "problem"),
    ("graph",),
    ("plans", "options", "argument_parsers"),
    ("limit",),
    ("passes",),
    ("regions",),
    ("returned_logits",),
    ("normalize",),
    ("memory",),
    ("schedule",),
    ("partition",),
    ("loops",),
    ("left_whole", "detect_stage"),
    ("pipeline_stages",),
    ("fewer_loops",),
    ("pipeline",),
    ("report",),
    ("captured", "length_ranges"),
    ("inductor_hooks",),
    ("hook_checks",),
    ("out_of_memory",),
    ("plans_by_length",),
    ("backend",),
    ("entry_point",),
    ("tracing",),
    ("compiling",),
    ("sequences",),
    ("trainers",),
    ("explainer", "planner", "linter"),
    ("measure", "stdlib_text", "fitting"),
    ("bench", "fuzz"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}


def _module(path: Path) -> str:
    parts = ("mstpass", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = frozenset(map(_module, FILES))


def _imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """The modules of mstpass that a file imports."""
    tree = parsed(path)
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mstpass":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "mstpass")


def _layer(module: str) -> str:
    return module.split(".")[1]


def test_every_file_has_a_layer() -> None:
    layers = {_layer(_module(path)) for path in FILES if path != ROOT / "__init__.py"}
    assert layers == LEVEL.keys()


def test_imports_go_downwards() -> None:
    public = ROOT / "__init__.py"  # the public names, from wherever they are
    found = [(p, other) for p in FILES if p != public for other in _imports(p)]
    wrong = [f"{name_of(p)} imports {o}" for p, o in found if not _is_below(o, _layer(_module(p)))]
    assert not wrong


def _is_below(imported: str, own: str) -> bool:
    """Whether a module may be imported by one of the layer ``own``."""
    if imported == "mstpass":  # by a user of the public interface, as the command line is
        return LEVEL[own] > LEVEL["backend"]
    other = _layer(imported)
    return other == own or LEVEL[other] < LEVEL[own]


def test_imports_upwards_are_found() -> None:
    assert _is_below("mstpass.graph.ops", "regions") and _is_below("mstpass.graph.ops", "graph")
    assert not _is_below("mstpass.regions.grow", "graph")
    assert not _is_below("mstpass.planner.models", "linter"), "they are in one row"
    assert _is_below("mstpass", "cli") and not _is_below("mstpass", "graph")


def test_no_circles() -> None:
    graph = nx.DiGraph((_module(p), other) for p in FILES for other in _imports(p))
    graph.remove_edges_from([(a, b) for a, b in graph.edges if "mstpass" in (a, b)])
    assert list(nx.simple_cycles(graph)) == []


def test_the_partition_problem_needs_no_graph() -> None:
    for path in (ROOT / "problem").glob("*.py"):
        assert "torch" not in path.read_text().replace("torch.utils.checkpoint", "").split(), path


@pytest.mark.parametrize("folder", ["mstpass", "tests", "examples", "viz"])
def test_files_and_functions_are_short(folder: str) -> None:
    """A file is read in one sitting, a function on one screen."""
    for path in (ROOT.parent / folder).rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
