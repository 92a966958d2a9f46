"""One step of a program: its model and inputs, and the values that the step leaves behind.

The first oracle: what a step computes, held to what eager mode computes in float64.

The error of a value is the root mean square of its difference from float64, relative to the root
mean square of the float64 value, or to a thousandth of the largest gradient's where that is more: a
gradient that is zero but for rounding has no relative error. Ours may exceed eager's own error in
the same precision by a factor and a constant, as both round at random. A value that is not finite
must be so in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mstpass.fuzz.case import Case
from mstpass.fuzz.render import source
from mstpass.measure import peak_bytes
from mstpass.returned_logits.placeholder import DroppedLogits
from mstpass.torch_internals.dynamo import maybe_mark_dynamic
from mstpass.torch_internals.fake_tensors import TorchDispatchMode

Values = dict[str, Tensor | None]
Call = Callable[..., Any]
Compile = Callable[[nn.Module], Call]
Inputs = Callable[[int, int], list[Tensor]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model's class, the function that makes its inputs, and the case that says how both are
    called."""

    model: Callable[[], nn.Module]
    inputs: Inputs
    setup: Case

    @staticmethod
    def of(case: Case) -> Program:
        """The program of a case."""
        text = source(case)
        name = f"<fuzz {hash(text)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        defined: dict[str, Any] = {"__name__": name}
        exec(compile(text, name, "exec"), defined)
        return Program(defined["Model"], defined["inputs"], case)

    def build(self, seed: int, dtype: torch.dtype) -> nn.Module:
        """The model, with the same parameters in each precision, but for their rounding."""
        torch.manual_seed(seed)
        return self.model().to(DTYPES[self.setup.dtype]).to(dtype)

    def arguments(self, seed: int, size: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(seed + 1)
        return [
            x.detach().to(DTYPES[self.setup.dtype]).to(dtype).requires_grad_(x.requires_grad)
            if x.is_floating_point()
            else x
            for x in self.inputs(*size)
        ]

    def run(
        self,
        compile: Compile = lambda model: model,
        seed: int = 0,
        exact: bool = False,
        peaks: list[int] | None = None,
    ) -> list[Values]:
        """The values of one step for each size, one after the other.

        Args:
            exact: in float64, from the same rounded parameters and inputs.
            peaks: gets the measured peak of one more step of the first size.
        """
        dtype = torch.float64 if exact else DTYPES[self.setup.dtype]
        model = self.build(seed, dtype)
        step = compile(model)
        values = []
        for number, size in enumerate(self.setup.sizes):
            inputs = self.arguments(seed + number, size, dtype)
            if not exact:
                mark_dynamic(inputs, self.setup)
            results = self._step(model, step, inputs, exact)
            values.append(_left_behind(model, inputs, results))
        if peaks is not None:
            inputs = self.arguments(seed, self.setup.sizes[0], dtype)
            model.zero_grad(set_to_none=True)
            peaks.append(peak_bytes(lambda: self._step(model, step, inputs, exact)))
        return values

    def _step(self, model: nn.Module, step: Call, inputs: list[Tensor], exact: bool) -> list[Any]:
        """Forward and backward; what the forward returns."""
        model.zero_grad(set_to_none=True)
        half = self.setup.autocast and not exact
        with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
            results = step(*inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        differentiate(results[:1] if self.setup.options.get("logits") == "drop" else results)
        return results


def _left_behind(model: nn.Module, inputs: Sequence[Tensor], results: Sequence[Any]) -> Values:
    return {
        **{f"output {i}": _kept(result) for i, result in enumerate(results)},
        **{f"gradient of {name}": _grad(p) for name, p in model.named_parameters()},
        **{f"gradient of input {i}": _grad(x) for i, x in enumerate(inputs)},
        **{f"buffer {name}": b.clone() for name, b in model.named_buffers()},
        **{f"input {i}": x.detach().clone() for i, x in enumerate(inputs)},
    }


def mark_dynamic(inputs: Sequence[Tensor], setup: Case) -> None:
    """Mark the batch, the length or both as sizes that vary from call to call."""
    dims = {"batch": (0,), "length": (1,), "both": (0, 1)}.get(setup.dynamic, ())
    for x in inputs:
        for dim in dims:
            if dim < x.ndim and x.shape[dim] > 1:
                maybe_mark_dynamic(x, dim)


def differentiate(results: Sequence[Any]) -> None:
    """Run the backward of all results, each with a gradient that is the same in each precision."""
    roots = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_tangent(root) for root in roots])


def _tangent(root: Tensor) -> Tensor:
    if root.ndim == 0:
        return torch.ones_like(root)
    return torch.arange(1, root.numel() + 1).remainder(7).div(8).view(root.shape).to(root)


def _kept(result: Any) -> Tensor | None:
    if not isinstance(result, Tensor) or isinstance(result, DroppedLogits):
        return None
    return result.detach().clone()


def _grad(leaf: Tensor) -> Tensor | None:
    return None if leaf.grad is None else leaf.grad.clone()


# ---- random numbers ----------------------------------------------------------------------------
def new_seed() -> Tensor:
    return torch.randint(2**62, ())


def drawn(size: Sequence[int], seed: Tensor, kind: str = "rand") -> Tensor:
    """What Inductor's random op stands for: the same numbers whenever it runs with one seed."""
    generator = torch.Generator().manual_seed(int(seed))
    return getattr(torch, kind)(size, generator=generator, dtype=torch.float32)


class DrawInFloat32(TorchDispatchMode):
    """Eager dropout draws its mask as Inductor's graphs do: in float32, by a seed for each mask.

    Then a step in float64, one in eager and one by rewritten graphs have equal masks after equal
    global seeds. Source: ``native_dropout`` in torch/_decomp/decompositions.py, which keeps what is
    drawn above the share to drop, where eager mode asks for the share to keep.

    Attributes:
        drew: a mask was drawn.
    """

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            x, probability = (*args, 0.5)[:2]  # the default is left out of the call
            self.drew = True
            dense = sorted(range(x.ndim), key=x.stride, reverse=True)  # as x lies in memory
            draws = drawn([x.shape[dim] for dim in dense], new_seed()) > 1 - probability
            return x.copy_(draws.permute([dense.index(dim) for dim in range(x.ndim)]))
        return func(*args, **(kwargs or {}))


# ---- values --------------------------------------------------------------------------------------
FACTOR = 4.0
ADDED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}
_ROUNDED_SUM = 2.0**-9  # what adding one chunk to a bfloat16 sum may cut off
_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class References:
    """What eager mode computes in each call of a program, by name.

    Attributes:
        exact: the same in float64.
        alone: what Inductor alone computes, where its random numbers are others than eager mode's:
            ours is held to it then, and may be as far from it as eager mode is from float64.
    """

    eager: Sequence[Values]
    exact: Sequence[Values]
    alone: Sequence[Values] | None = None


def wrong_values(ours: Sequence[Values], references: References, setup: Case) -> dict[str, str]:
    """What is wrong: the name of a value and how it differs, for each that differs."""
    wrong: dict[str, str] = {}
    alone = references.alone
    calls = zip(ours, references.eager, references.exact, strict=True)
    for call, (mine, theirs, true) in enumerate(calls):
        where = "" if call == 0 else f" of call {call + 1}"
        expected, like = (true, theirs) if alone is None else (alone[call], alone[call])
        for name, value in expected.items():
            if name.startswith("output") and mine[name] is None:
                continue  # a placeholder for logits, or no tensor at all
            reason = _unlike(mine[name], like[name], setup)
            if not reason:
                error = _error(mine[name], value, _scale(expected))
                allowed = _error(theirs[name], true[name], _scale(true))
                reason = _too_far(mine[name], error, allowed, setup)
            if reason:
                wrong[name + where] = reason
    return wrong


def _unlike(mine: Tensor | None, theirs: Tensor | None, setup: Case) -> str:
    """How our value is of another kind than eager mode's, or not equal where it must be."""
    if mine is None or theirs is None:
        there = next((v for v in (mine, theirs) if v is not None), None)
        alike = (mine is None) == (theirs is None) or rms(there) == 0
        return "" if alike else f"ours is {_text(mine)}, eager's {_text(theirs)}"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"ours is {_text(mine)}, eager's {_text(theirs)}"
    if not mine.is_floating_point():
        same = _is_low(setup) or torch.equal(mine, theirs)
        return "" if same else f"{int((mine != theirs).sum())} of {mine.numel()} differ"
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        bad, in_eager = (int((~v.isfinite()).sum()) for v in (mine, theirs))
        return f"{bad} are not finite, {in_eager} in eager"
    return ""


def _too_far(mine: Tensor | None, error: float, eagers: float, setup: Case) -> str:
    if mine is None or not mine.is_floating_point():
        return ""
    added = ADDED[torch.bfloat16] if _is_low(setup) else ADDED[mine.dtype]
    if _is_low(setup) and setup.options.get("accumulate") == "input":
        added += _ROUNDED_SUM * _most_chunks(setup)
    return "" if error <= FACTOR * eagers + added else f"error {error:.1e}, eager's {eagers:.1e}"


def _most_chunks(setup: Case) -> int:
    """The most chunks that a call may have under the option ``chunk_tokens``; 0 without it."""
    chunk_tokens = setup.options.get("chunk_tokens")
    tokens = max(batch * length for batch, length in setup.sizes)
    return math.ceil(tokens / chunk_tokens) if chunk_tokens else 0


def _error(value: Tensor | None, true: Tensor | None, scale: float) -> float:
    """The error of a value; infinite where only the true one is zero."""
    if value is None or true is None or not value.is_floating_point():
        return 0.0
    finite = value.isfinite() & true.isfinite()
    base = max(rms(true[finite]), _FLOOR * scale)
    error = rms(value[finite].double() - true[finite])
    if not base:
        return math.inf if error else 0.0
    return error / base


def _scale(values: Values) -> float:
    """The root mean square of the largest gradient."""
    return max((rms(v) for name, v in values.items() if "grad" in name), default=0.0)


def _is_low(setup: Case) -> bool:
    return setup.autocast or setup.dtype == "bfloat16"


def rms(value: Any) -> float:
    """The root mean square of the finite numbers of a tensor; 0 of what has none."""
    if not isinstance(value, Tensor) or not value.numel() or not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()].double()
    return float(finite.norm()) / math.sqrt(max(1, finite.numel()))


def _text(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} {tuple(value.shape)}"
