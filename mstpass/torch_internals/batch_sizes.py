"""The sizes of another batch in a graph of symbolic sizes: its hints, bounds and guards.

A ``ShapeEnv`` knows one value for each symbol, that of the batch which Dynamo traced. Costs,
schedules and the choice between kernels follow from it. ``at_sizes`` puts the values of another
batch in its place, as long as a block runs, which works on copies of what the ``ShapeEnv`` holds.
Source: torch/fx/experimental/symbolic_shapes.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import re
import types
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSet,
    Sequence,
)
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

__all__ = ["TracingContext", "preserve_rng_state", "tracing"]

_LOCAL = re.compile(r"\bL\['(\w+)'\]")  # what guards call a local variable
Values = Mapping[sympy.Symbol, int]
_COUNTERS = ("_version_counter", "_replacements_version_counter")  # of what is cached
_UNBOUNDED = 2**60  # torch's own bound of sizes is one less than 2^63
_NONZERO, _INDEX = torch.ops.aten.nonzero.default, torch.ops.aten.index.Tensor


@contextlib.contextmanager
def at_sizes(
    environment: ShapeEnv, values: Values, most: Values = types.MappingProxyType({})
) -> Iterator[list[Any]]:
    """The symbols have these values in here.

    Args:
        most: the greatest value that a symbol is known to have.

    Yields:
        A list that holds the guards (sympy expressions) which the block added, once it has ended.
        What was compiled in the block is right for batches for which they hold.
    """
    attributes = vars(environment)
    before = attributes.copy()
    attributes.update({name: _kept(value) for name, value in before.items()}, frozen=False)
    for symbol, value in values.items():
        environment.backed_var_to_val[symbol] = sympy.Integer(value)
    for symbol, bound in most.items():
        known = environment.var_to_range[symbol]
        environment.var_to_range[symbol] = ValueRanges(known.lower, min(known.upper, bound))
    _forget(environment)
    added: list[Any] = []
    try:
        yield added
    finally:
        added += [guard.expr for guard in environment.guards[len(before["guards"]) :]]
        counted = {name: attributes[name] for name in _COUNTERS if name in attributes}
        attributes.clear()
        attributes.update({**before, **counted})
        _forget(environment)


def _kept(value: Any) -> Any:
    """A copy of what changes in place, of a dict's values too; else the value itself."""
    changes = list | MutableMapping | MutableSet | itertools.count
    kept = copy.copy(value) if isinstance(value, changes) else value
    if isinstance(kept, dict):
        kept.update({key: _kept(inner) for key, inner in kept.items()})
    return kept


def _forget(environment: ShapeEnv) -> None:
    """Have the environment compute anew what it has cached."""
    for counter in _COUNTERS:
        if hasattr(environment, counter):
            setattr(environment, counter, getattr(environment, counter) + 1)
    for function in _caching():
        function.cache_clear()


@functools.cache
def _caching() -> tuple[Any, ...]:
    return tuple(f for f in vars(ShapeEnv).values() if hasattr(f, "cache_clear"))


def hint(size: int | torch.SymInt) -> int:
    """The value of a size in the batch at hand; of one that depends on data, the most it may be.

    It is 1 where nothing is known of it.
    """
    if isinstance(size, int):
        return size
    node = size.node
    environment = node.shape_env
    if not node.has_hint():
        found = _most_by_data(environment, node.expr)
        return 1 if found is None else found
    return _hints(environment, environment._version_counter)(node.expr)


@functools.lru_cache(maxsize=1)
def _hints(environment: ShapeEnv, version: int) -> Callable[[sympy.Expr], int]:
    """The values of expressions; with a new version of the environment they may be others."""

    @functools.cache
    def value(expr: sympy.Expr) -> int:
        return int(expr.xreplace(environment.backed_var_to_val))

    return value


def has_hint(size: int | torch.SymInt) -> bool:
    """Whether a size has a value in the batch at hand, or is known to be at most one."""
    if isinstance(size, int) or size.node.has_hint():
        return True
    return _most_by_data(size.node.shape_env, size.node.expr) is not None


def _most_by_data(environment: ShapeEnv, expr: sympy.Expr) -> int | None:
    """The value of an expression with sizes that depend on data at the most that they may be.

    Such a size has the hint that ``note_sizes_by_data`` gives it, or is at most its bound.
    """
    known = dict(environment.backed_var_to_val)
    for symbol in expr.free_symbols - known.keys():
        most = environment.var_to_hint_override.get(symbol, bounds_of(environment, symbol)[1])
        if most is None:
            return None
        known[symbol] = sympy.Integer(most)
    return int(expr.xreplace(known))


def note_sizes_by_data(nodes: Iterable[fx.Node]) -> None:
    """Let estimates take the rows that masks select at their most: all of them.

    Neither a range nor a guard is added.
    """
    for node in nodes:
        if not node.meta.get("unbacked_bindings") or not node.all_input_nodes:
            continue
        chosen = node.all_input_nodes[0 if node.target is _NONZERO else -1].meta.get("val")
        if node.target in (_NONZERO, _INDEX) and isinstance(chosen, torch.Tensor):
            size = node.meta["val"].shape[0]
            symbol, most = size.node.expr, math.prod(map(hint, chosen.shape))
            if symbol.is_Symbol:
                size.node.shape_env.var_to_hint_override[symbol] = most


def bounds_of(environment: ShapeEnv, expr: sympy.Expr) -> tuple[int, int | None]:
    """The least and the greatest value that a size may have; None: any."""
    known = environment.bound_sympy(expr)
    lower = int(known.lower) if known.lower.is_Integer else 0
    upper = known.upper
    return lower, int(upper) if upper.is_Integer and upper < _UNBOUNDED else None


def most(size: int | torch.SymInt) -> int | None:
    """The greatest value that a size may have; None: any."""
    if isinstance(size, int):
        return size
    return bounds_of(size.node.shape_env, size.node.expr)[1]


def guards_of(environment: ShapeEnv) -> list[Any]:
    """The guards as sympy expressions."""
    return [guard.expr for guard in environment.guards]


def named(environment: ShapeEnv, values: Values) -> tuple[tuple[str, int], ...]:
    """The values of symbols with the places that they come from, such as ``ids.size()[1]``."""
    return tuple((_name(environment, symbol), value) for symbol, value in values.items())


def _name(environment: ShapeEnv, symbol: sympy.Symbol) -> str:
    sources = environment.var_to_sources.get(symbol)
    if not sources:
        return str(symbol)
    name: Any = sources[0].name  # a property from 2.12 on
    return _LOCAL.sub(r"\1", name() if callable(name) else name)


def hold(conditions: Sequence[Any], values: Values) -> bool:
    """Whether all conditions are known to hold for these values of symbols."""
    return all(condition.xreplace(dict(values)) == True for condition in conditions)  # noqa: E712


def may_hold(conditions: Sequence[Any], values: Values) -> bool:
    """Whether no condition is known to fail; those on other symbols may hold."""
    return all(condition.xreplace(dict(values)) != False for condition in conditions)  # noqa: E712


def symbols_among(inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """The symbols that are inputs themselves, of strides and numbers too, with their positions."""
    found: dict[sympy.Symbol, int] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found.setdefault(value.node.expr, position)
    return found


def symbols_of_sizes(inputs: Sequence[Any]) -> frozenset[sympy.Symbol]:
    """The symbols of the inputs' sizes; none, if one of them is no input itself."""
    sizes: list[Any] = [size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape]
    symbolic = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    found = frozenset(symbol for expr in symbolic for symbol in expr.free_symbols)
    return found if found <= symbols_among(inputs).keys() else frozenset()


def symbols_of_inputs(graph: fx.Graph) -> tuple[ShapeEnv, dict[str, sympy.Symbol]]:
    """The environment of a graph with symbolic sizes, and its symbols by name, those included that
    are known to equal others.

    Raises:
        LookupError: no input is a symbolic size.
    """
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    sizes = [value for value in values if isinstance(value, torch.SymInt)]
    if not sizes:
        raise LookupError("no input is a symbolic size")
    environment = sizes[0].node.shape_env
    return environment, {symbol.name: symbol for symbol in environment.backed_var_to_val}


# ---- the inputs of a graph -----------------------------------------------------------------------
def fake_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a graph that Dynamo captured, as fake tensors that hold no memory.

    Single numbers stay as they are: the graph may hold a value of them.

    Raises:
        LookupError: Dynamo recorded none.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    found = []
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, FakeTensor):
            value = node.meta.get("example_value")
            if not isinstance(value, FakeTensor):
                raise LookupError(f"{node.name} has no fake tensor")
        found.append(value)
    return found


def sources_of_numbers(context: TracingContext, inputs: Sequence[Any]) -> dict[torch.Tensor, Any]:
    """Where single numbers come from, such as the floats of modules, which are symbols as well.

    Dynamo clears its record of that (``tensor_to_context``) once the graph is compiled, and without
    it the graph cannot read their values when it is compiled again.
    """
    known = context.tensor_to_context
    numbers = (x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 0)
    return {x: known[x] for x in numbers if x in known}


def with_sizes(inputs: Sequence[Any]) -> list[Any]:
    """Fake inputs of symbolic sizes made anew, with the values that their symbols have now.

    Inputs that are views of one tensor stay so, such as ids and shifted labels.

    Raises:
        LookupError: an input cannot be made anew: it shares its memory with one that it is no view
            of, or is of a class of its own.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    storages = Counter(x.untyped_storage()._cdata for x in tensors)
    symbolic = {x.untyped_storage()._cdata for x in tensors if _is_symbolic(x)}
    bases: dict[int, tuple[Any, torch.Tensor]] = {}  # by storage: the base, and the new one

    def renewed(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return _size(value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()._cdata
        if storage not in symbolic:
            return value
        if storages[storage] == 1:
            new = _renewed(value)
        else:
            base = value if value._base is None else value._base
            of_all, new = bases.setdefault(storage, (base, _renewed(base)))
            if of_all is not base or base.dtype != value.dtype:
                raise LookupError("two inputs share their memory")
            new = new if value is base else _view(new, value)
        return new.requires_grad_(value.requires_grad)

    with torch.no_grad():
        return [renewed(x) for x in inputs]


def _renewed(value: torch.Tensor) -> torch.Tensor:
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        raise LookupError(f"an input is a {type(value).__name__}")
    shape, strides = ([_size(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with value.fake_mode:
        new = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    start = value.storage_offset()
    return _view(new, value) if isinstance(start, torch.SymInt) or start else new


def _view(base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A view where the value lies in its storage: loops copy what does not start a storage."""
    shape, strides = ([_size(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return base.as_strided(shape, strides, _size(value.storage_offset()))


def _is_symbolic(value: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))


def _size(size: Any) -> Any:
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.shape_env.create_symintnode(size.node.expr, hint=hint(size))
