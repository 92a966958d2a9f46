"""What the generated code of a loop does in one iteration."""

from __future__ import annotations

import ast
import dataclasses
import re

_COUNTER = "torch.ops.mstpass.counter.default"


@dataclasses.dataclass(frozen=True)
class LoopCode:
    """The body of a loop.

    Attributes:
        kernels: the Triton kernels that it launches.
        cpp_kernels: the C++ kernels that it calls.
        calls: the operators and library functions that it calls.
        sums: those of them that add a product to that of the chunks before.
        syncs: values that it reads from a device, so that the host waits.
        device_guards: how often it makes a device the current one.
        temporaries: shape and dtype of each buffer that it allocates on the device; a size that is
            not a number is None.
    """

    name: str
    kernels: tuple[str, ...]
    cpp_kernels: tuple[str, ...]
    calls: tuple[str, ...]
    sums: int
    syncs: tuple[str, ...]
    device_guards: int
    temporaries: tuple[tuple[tuple[int | None, ...], str], ...]


def loops_of(code: str) -> list[LoopCode]:
    """The loops of a generated module, in its order."""
    tree = ast.parse(code)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [_loop(f, code) for f in functions if re.fullmatch(r"mst_step_\d+", f.name)]


def unused_buffers(text: str) -> list[str]:
    """What Triton kernels are given and neither read nor write: memory that nothing needs."""
    kernels = re.findall(r"^def (triton_\w+)\((.*?)\):\n(.*?)^'''", text, re.DOTALL | re.MULTILINE)
    return [
        f"{name}: {pointer}"
        for name, arguments, body in kernels
        for pointer in re.findall(r"\w+_ptr\d+", arguments)
        if not re.search(rf"\b{pointer}\b", body)
    ]


def kernels_in_32_bits(code: str, most_elements: int = 2**31) -> list[str]:
    """The Triton kernels that compute offsets in 32 bits into tensors of more elements."""
    tree = ast.parse(code)
    bodies = re.findall(r"^def (triton_\w+)\((.*?)^'''", code, re.DOTALL | re.MULTILINE)
    text: dict[str, str] = dict(bodies)
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        sizes: dict[str, int] = {}
        calls = sorted(
            (n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.Expr)),
            key=lambda node: node.lineno,
        )
        for line in calls:
            call = line.value
            if not isinstance(call, ast.Call):
                if isinstance(line, ast.Assign) and ast.unparse(call) in sizes:
                    sizes[ast.unparse(line.targets[0])] = sizes[ast.unparse(call)]
                continue
            name = ast.unparse(call.func)
            if isinstance(line, ast.Assign) and (size := _extent(call, name)):
                sizes[ast.unparse(line.targets[0])] = size
            elif name == "assert_size_stride":
                sizes[ast.unparse(call.args[0])] = _extent_of(*map(_sizes, call.args[1:3]))  # type: ignore[arg-type]
            elif name.endswith(".run"):
                kernel = name.removesuffix(".run")
                largest = max((_largest(arg, sizes) for arg in call.args), default=0)
                if largest > most_elements and "tl.program_id(0).to(tl.int64)" not in text[kernel]:
                    found.append(kernel)
    return found


def _largest(argument: ast.expr, sizes: dict[str, int]) -> int:
    if isinstance(argument, ast.Call):
        return _extent(argument, ast.unparse(argument.func))
    return sizes.get(ast.unparse(argument), 0)


def _extent(call: ast.Call, name: str) -> int:
    """The elements from the first to the last of a tensor that a call makes; 0: not known."""
    first = {"reinterpret_tensor": 1, "empty_strided_cuda": 0}.get(name)
    return 0 if first is None else _extent_of(*map(_sizes, call.args[first : first + 2]))


def _extent_of(shape: tuple[int | None, ...], strides: tuple[int | None, ...]) -> int:
    pairs = zip(shape, strides, strict=True)
    return 1 + sum(((size or 1) - 1) * (stride or 0) for size, stride in pairs)


def _loop(function: ast.FunctionDef, code: str) -> LoopCode:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    made = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    }
    on_cpu = {
        name
        for name, call in made.items()
        if ast.unparse(call.func) in (_COUNTER, "empty_strided_cpu")
    } | {f"{function.name}_arg0_1"}
    for node in ast.walk(function):  # in the order of the lines, as an alias follows its source
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in on_cpu:
            on_cpu.add(ast.unparse(node.targets[0]))
    read = [name.removesuffix(".item") for name in names if name.endswith(".item")]
    return LoopCode(
        name=function.name,
        kernels=tuple(n.removesuffix(".run") for n in names if n.endswith(".run")),
        cpp_kernels=tuple(n for n in names if n.startswith("cpp_")),
        calls=tuple(n for n in names if n.startswith(("extern_kernels.", "torch.ops."))),
        sums=sum(
            name.endswith("add_product_.default") and ast.unparse(call.args[3]) != "0"
            for name, call in zip(names, calls, strict=True)
        ),
        syncs=tuple(name for name in read if name not in on_cpu),
        device_guards=sum(name.endswith("_DeviceGuard") for name in names),
        temporaries=tuple(
            (_sizes(call.args[0]), ast.unparse(call.args[2]))
            for call in made.values()
            if ast.unparse(call.func) == "empty_strided_cuda"
        ),
    )


def _sizes(shape: ast.expr) -> tuple[int | None, ...]:
    assert isinstance(shape, ast.Tuple)
    return tuple(
        size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else None
        for size in shape.elts
    )
