"""Run on the CPU what a test runs on a GPU.

Many of PyTorch's tests name a GPU although they test nothing that only a GPU has. A test file is
imported with these changes, on its syntax tree:

- in functions, the device "cuda" or "xpu" (also as ``GPU_TYPE`` or ``DEVICE_TYPE``) is "cpu", and
  ``x.cuda()`` is ``x.cpu()``;
- decorators that skip a test where no GPU is, are left out.

A test that does need a GPU now fails, under Inductor as well. Lists of parameters stay as they are.
In them a test file's own ``DEVICE_TYPE``, "cpu" on a machine without a GPU, is "xpu": so no two
tests have the same name.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

_GPUS = ("cuda", "xpu")
_DEVICE = re.compile(r"(cuda|xpu)(:\d)?")
_NAMES = ("GPU_TYPE", "DEVICE_TYPE")
_ASKS_FOR_A_GPU = re.compile(
    r"requires_(gpu|cuda|xpu|accelerator)\w*"
    r"|(unittest\.)?skip(If|Unless)\((not )?(HAS|TEST)_(GPU|CUDA|XPU)\w*,.*"
    r"|(unittest\.)?skip(If|Unless)\((not )?torch\.(cuda|xpu|accelerator)\.is_available\(\),.*"
)


class _Cpu(ast.NodeTransformer):
    def __init__(self) -> None:
        self.depth = 0  # of functions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = _others(node.decorator_list)
        self.depth += 1
        node.body = [self.visit(statement) for statement in node.body]
        self.depth -= 1
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = _others(node.decorator_list)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if not self.depth and ast.unparse(node.targets[0]) in _NAMES:
            node.value = ast.copy_location(ast.Constant("xpu"), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_gpu = self.depth and isinstance(node.value, str) and _DEVICE.fullmatch(node.value)
        return ast.copy_location(ast.Constant("cpu"), node) if is_gpu else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_gpu = self.depth and node.id in _NAMES and isinstance(node.ctx, ast.Load)
        return ast.copy_location(ast.Constant("cpu"), node) if is_gpu else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        return node  # ``device == GPU_TYPE`` asks for a test's parameter

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if self.depth and isinstance(function, ast.Attribute) and function.attr in _GPUS:
            function.attr, node.args, node.keywords = "cpu", [], []
        return node


def _others(decorators: list[ast.expr]) -> list[ast.expr]:
    return [d for d in decorators if not _ASKS_FOR_A_GPU.fullmatch(ast.unparse(d))]


def on_cpu(source: str | bytes) -> ast.Module:
    """The syntax tree of a test file that runs on the CPU."""
    tree: ast.Module = _Cpu().visit(ast.parse(source))
    return ast.fix_missing_locations(tree)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        return compile(on_cpu(self.get_data(self.path)), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, path: Path):
        self.path = path

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.rpartition(".")[2] != self.path.stem:
            return None
        loader = _Loader(fullname, str(self.path))
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


def import_on_cpu(path: Path) -> None:
    """From now on, an import of the test file imports it as it runs on the CPU."""
    sys.meta_path.insert(0, _Finder(path))
