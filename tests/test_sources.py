"""What holds of every function of the package, as its source says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

from mstpass.walk import needed_first, walk
from tests.source_files import FILES, name_of, parsed

RECURSIVE: dict[str, dict[str, str]] = {  # of each file: what it recurses along, which is bounded
    "backend.py": dict.fromkeys(
        ["_compiled_and_reported", "_without_repeated_collectives"],
        "once more, without repeated collectives",
    ),
    "fuzz/case.py": dict.fromkeys(["_record", "_value"], "nested fields"),
    "fuzz/graphs.py": dict.fromkeys(["_wide_types", "in_float64"], "loops in loops"),
    "fuzz/reduce.py": dict.fromkeys(["_smaller_values", "smaller_cases"], "nested fields"),
    "fuzz/render.py": dict.fromkeys(["_name_of"], "nested fields"),
    "graph/builder.py": dict.fromkeys(["SizeNodes._node"], "the terms of a size"),
    "graph/graph_text.py": dict.fromkeys(["_arg"], "nested arguments"),
    "graph/joint.py": dict.fromkeys(["tensors_of"], "nested results"),
    "graph/narrow_offsets.py": dict.fromkeys(["_calls"], "loops in loops"),
    "graph/row_sums.py": dict.fromkeys(
        [
            "_RowSums._of_call",
            "_RowSums._of_choice",
            "_RowSums._of_product",
            "_RowSums._of_view",
            "_RowSums.of",
        ],
        "a sum of sums, which is as deep as one loss is written",
    ),
    "linter/graph_findings.py": dict.fromkeys(["_hashable"], "nested arguments"),
    "memory/simulate_graph.py": dict.fromkeys(
        ["_inner_bytes", "body_bytes", "op_of"], "loops in loops"
    ),
    "out_of_memory.py": dict.fromkeys(
        [
            "LeanerPlans._backward_failed",
            "LeanerPlans._run_after_failures",
            "LeanerPlans._take",
            "LeanerPlans._take_leaner",
            "LeanerPlans._take_leaner_next",
        ],
        "leaner plans, of which there are few",
    ),
    "partition/reconstruct/rewrite_joint.py": dict.fromkeys(
        ["_low_dtype_of_loop_result", "low_dtype"], "loops in loops"
    ),
    "partition/solve.py": dict.fromkeys(["_has_a_plan", "_verified", "solve"], "the next solver"),
    "partition/solvers/checkpoint_table.py": dict.fromkeys(
        ["CheckpointTable._nested", "CheckpointTable._solve_nested"], "levels of nested stops"
    ),
    "partition/solvers/candidate.py": dict.fromkeys(["by_halves"], "halves"),
    "plain_data.py": dict.fromkeys(["_dataclass", "_decoder"], "nested fields"),
    "planner/models.py": dict.fromkeys(["_absurd_sizes"], "nested settings"),
    "problem/names.py": dict.fromkeys(["renamed"], "nested fields"),
    "problem/problem_json.py": dict.fromkeys(["encoded"], "nested fields"),
    "regions/wide_growth.py": dict.fromkeys(["WideGrowth._can_pull"], "an item and its op"),
    "regions/head_growth.py": dict.fromkeys(["HeadGrowth._why_not"], "an item and its op"),
    "sequences/huggingface.py": dict.fromkeys(["_outermost"], "modules"),
    "sequences/ranks.py": dict.fromkeys(["_of_two_dims", "ranks_of"], "once more, for two dims"),
    "loops/candidate_modes.py": {"find_candidates": "without a budget, and then with one"},
    "torch_internals/batch_sizes.py": {"_kept": "containers in containers"},
    "torch_internals/inductor.py": dict.fromkeys(
        ["_take_in.inside"], "operands that have no buffer"
    ),
    "tracing/joint_graphs.py": dict.fromkeys(["cause_of"], "an error in an error"),
    "tracing/names.py": dict.fromkeys(
        ["module_of", "modules_near", "unwrapped"], "functions in functions"
    ),
}


def test_every_assertion_has_a_sentence() -> None:
    """An assertion that does not hold is told in a report, which must say what was expected."""
    nodes = ((path, node) for path in FILES for node in ast.walk(parsed(path)))
    bare = [f"{p}:{n.lineno}" for p, n in nodes if isinstance(n, ast.Assert) and n.msg is None]
    assert not bare


# ---- recursion -----------------------------------------------------------------------------------
def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, dict[str, str]]]:
    """Each function's name with its classes and functions around it, and the names it can call."""
    stack: list[tuple[ast.AST, str, dict[str, str]]] = [(tree, "", {})]
    while stack:
        node, place, known = stack.pop()
        own = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.FunctionDef)]
        if isinstance(node, ast.ClassDef):
            inner = known | {f"self.{n.name}": f"{place}{n.name}" for n in own}
        else:
            inner = known | {n.name: f"{place}{n.name}" for n in own}
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield f"{place}{child.name}", child, inner
                stack.append((child, f"{place}{child.name}.", inner))
            else:
                name = f"{child.name}." if isinstance(child, ast.ClassDef) else ""
                stack.append((child, f"{place}{name}", inner))


def _called(function: ast.AST, known: dict[str, str]) -> set[str]:
    """The functions of the file that a function calls, or hands to one that may."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return {known[name] for name in found if name in known}


def _recursive(path: Path) -> set[str]:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, function, known in _functions(parsed(path)):
        graph.add_edges_from((name, other) for other in _called(function, known))
    circles = (c for c in nx.strongly_connected_components(graph) if len(c) > 1)
    return {*nx.nodes_with_selfloops(graph), *(name for circle in circles for name in circle)}


def test_no_function_recurses_along_a_graph() -> None:
    """A chain of nodes may be longer than Python's stack: mstpass/walk.py walks without it."""
    walking = [path for path in FILES if "bench" not in path.parts]  # which walks no graph
    found = {name_of(path): _recursive(path) for path in walking}
    listed = {name: set(functions) for name, functions in RECURSIVE.items()}
    assert {name: functions for name, functions in found.items() if functions} == listed


def test_the_longest_chains_are_walked() -> None:
    links = {n: [n - 1] for n in range(1, 20_000)}
    assert len([*walk([19_999], lambda n: links.get(n, ()))]) == 20_000
    known: dict[int, int] = {}
    for n in needed_first(19_999, lambda n: links.get(n, ()), known):
        known[n] = 1 + sum(known[m] for m in links.get(n, ()))
    assert known[19_999] == 20_000
