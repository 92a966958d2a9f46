"""Differentiate fake CUDA tensors on a machine that has no CUDA device.

The autograd engine asks a CUDA build of torch whether a device has a context, which needs a driver.
A build without CUDA lacks two more things: an answer to what the accelerator is, and the device
guard that switches devices. Here

- two methods of torch's CUDA hooks are replaced, in a copy of their table of virtual methods;
- a guard that does nothing is compiled into Inductor's compile cache, and loaded
  (pretended_gpu_guard.cpp): a build without CUDA is used with a C++ compiler anyway;
- the engine runs on the calling thread: the threads of its devices may run already.

Source: torch/csrc/autograd/engine.cpp, aten/src/ATen/detail/AcceleratorHooksInterface.h,
c10/core/impl/DeviceGuardImplInterface.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mstpass.torch_internals.caches import cache_folder
from mstpass.torch_internals.versions import installed

_GUARD = Path(__file__).with_name("pretended_gpu_guard.cpp")
_ROOT = Path(torch.__file__).parent
_TABLE_ENTRIES = 128  # of virtual methods: no fewer than there are
_HEADER_ENTRIES = 2  # in front of the methods, by the Itanium C++ ABI
_COMPILERS = ("c++", "g++", "clang++")

_pointers = ctypes.POINTER(ctypes.c_void_p)


class NoPretendedGpu(RuntimeError):
    """This machine cannot pretend to have a GPU; the message says what it lacks."""


@contextmanager
def engine_without_gpu() -> Iterator[None]:
    """``torch.autograd`` works on fake tensors on ``cuda:0``, in this thread.

    Raises:
        NoPretendedGpu: torch is built without CUDA, and no C++ compiler is found; or the system is
            not one where this was tried.
    """
    answers: dict[str, Callable[..., bool]] = {"hasPrimaryContext": _no_context}
    if not torch.backends.cuda.is_built():
        _load_guard()
        answers["isBuilt"] = _built
    with _cuda_hooks(answers), torch.autograd.set_multithreading_enabled(False):
        yield


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)
def _no_context(*_: Any) -> bool:
    return False


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
def _built(*_: Any) -> bool:
    return True


@contextmanager
def _cuda_hooks(answers: Mapping[str, Callable[..., bool]]) -> Iterator[None]:
    """Replace methods of the one object of torch's CUDA hooks."""
    if sys.platform == "win32":
        raise NoPretendedGpu("a GPU can be pretended on Linux and macOS, not on Windows")
    methods = virtual_methods()
    table_of = ctypes.cast(cuda_hooks(), _pointers)
    header_bytes = _HEADER_ENTRIES * ctypes.sizeof(ctypes.c_void_p)
    original = table_of[0]
    assert original is not None, "the original is known"
    copy = (ctypes.c_void_p * (_HEADER_ENTRIES + _TABLE_ENTRIES))()
    ctypes.memmove(copy, original - header_bytes, ctypes.sizeof(copy))
    for name, answer in answers.items():
        # Behind the destructor, which is declared first and takes two entries.
        place = _HEADER_ENTRIES + methods.index(name) + 1
        copy[place] = ctypes.cast(answer, ctypes.c_void_p).value  # type: ignore[arg-type]
    table_of[0] = ctypes.addressof(copy) + header_bytes
    try:
        yield
    finally:
        table_of[0] = original


def virtual_methods() -> list[str]:
    """The virtual methods of the hooks in the order of their declaration, the destructor first."""
    header = _ROOT / "include/ATen/detail/AcceleratorHooksInterface.h"
    return re.findall(r"(?m)^  virtual [\w:<>&* ]*?(~?\w+)\(", header.read_text())


def cuda_hooks() -> int:
    find = _library("torch_cpu")._ZN2at6detail12getCUDAHooksEv  # at::detail::getCUDAHooks()
    find.restype = ctypes.c_void_p
    address: int = find()
    return address


def _library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(_ROOT / f"lib/lib{name}.{suffix}"))


@functools.cache
def _load_guard() -> None:
    """Compile the guard, unless an earlier process did, and load it."""
    library = cache_folder() / f"mstpass_pretended_gpu_guard-{installed()}.so"
    with contextlib.suppress(OSError):  # it is not there, or broken
        ctypes.CDLL(str(library))
        return
    _compile_guard(library)
    ctypes.CDLL(str(library))


def _compile_guard(library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise NoPretendedGpu(
            "this build of torch has no CUDA, and no C++ compiler is found to make up for it: "
            "install g++ or clang++, or a CUDA build of torch (it needs no GPU)"
        )
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{_ROOT}/include"]
        linked = [f"-L{_ROOT}/lib", "-lc10", f"-Wl,-rpath,{_ROOT}/lib"]
        done = subprocess.run(
            [compiler, *flags, str(_GUARD), "-o", str(made), *linked],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoPretendedGpu(f"{compiler} cannot compile {_GUARD.name}: {done.stderr.strip()}")
        made.replace(library)  # at once, so that another process never loads half a file
