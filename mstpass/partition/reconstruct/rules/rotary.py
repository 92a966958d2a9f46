"""The inverse of a rotary embedding is the inverse rotation (RoFormer, arXiv 2104.09864).

    y = x cos t + turn(x) sin t,   turn([a, b]) = [-b, a]
    x = y cos t - turn(y) sin t

This holds because cos^2 + sin^2 = 1 and both halves of the last dim have the same angles. The graph
must show both: a ``cos`` and a ``sin`` of one value t, and t as two equal halves.
"""

from __future__ import annotations

from torch import fx

from mstpass.partition.reconstruct.rule import (
    CAST,
    TOLERANT,
    Found,
    Inverse,
    Read,
    Refused,
    Writer,
    aten,
    cast_to,
    dtype_of,
    is_float,
    names,
    rank,
    shape,
    unit_roundoff,
)

_SEE_THROUGH = (aten.unsqueeze.default, aten.view.default, CAST)


def find_rotary(node: fx.Node) -> Found:
    match = _match(node)
    if match is None:
        return
    x, cos, sin = match
    angle = _angle(cos, aten.cos.default)
    if angle is None or angle is not _angle(sin, aten.sin.default):
        yield Refused(x.name, node.name, "rotary", "its cos and sin are not of one angle")
    elif not _halves_equal(angle):
        yield Refused(x.name, node.name, "rotary", "the halves may have different angles")
    elif dtype_of(node) is None or not is_float(x):
        yield Refused(x.name, node.name, "rotary", "it is not a float")
    else:
        bound = f"8 * {unit_roundoff(dtype_of(node))} of the pair"  # type: ignore[arg-type]
        yield Inverse(x.name, names(node, cos, sin), node.name, "rotary", TOLERANT, bound)


def write_rotary(writer: Writer, op: fx.Node, target: fx.Node, read: Read) -> fx.Node:
    match = _match(op)
    assert match is not None, "the pattern matches"
    _, cos, sin = match
    y = read(op)
    half = shape(op)[-1] // 2
    first = writer.call(aten.slice.Tensor, y, rank(op) - 1, 0, half)
    second = writer.call(aten.slice.Tensor, y, rank(op) - 1, half, 2 * half)
    back = writer.call(aten.cat.default, [second, writer.call(aten.neg.default, first)], -1)
    products = (
        writer.call(aten.mul.Tensor, y, read(cos)),
        writer.call(aten.mul.Tensor, back, read(sin)),
    )
    return cast_to(writer, writer.call(aten.add.Tensor, *products), dtype_of(target))


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin) if the node is ``x * cos + turn(x) * sin``."""
    for straight, turned in (node.args[:2], node.args[1::-1]):
        for x, cos in _factors(straight):
            for turn, sin in _factors(turned):
                if turn.target is aten.cat.default and _is_turn(turn, x):
                    return x, cos, sin
    return None


def _factors(node: object) -> list[tuple[fx.Node, fx.Node]]:
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor:
        return []
    a, b = node.args[:2]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return []
    return [(a, b), (b, a)]


def _is_turn(turn: fx.Node, x: fx.Node) -> bool:
    """Whether ``turn`` is ``cat([-x[..., h:], x[..., :h]], -1)``."""
    parts = turn.args[0]
    last = rank(x) - 1
    if not isinstance(parts, list | tuple) or len(parts) != 2 or _dim(turn, 1, last) != last:
        return False
    minus, first = parts
    if not isinstance(minus, fx.Node) or not isinstance(first, fx.Node):
        return False
    if minus.target is not aten.neg.default:
        return False
    half = shape(x)[-1] // 2
    (second,) = minus.all_input_nodes
    return _is_slice(first, x, 0, half) and _is_slice(second, x, half, 2 * half)


def _dim(node: fx.Node, position: int, last: int) -> object:
    dim = node.args[position] if len(node.args) > position else 0
    return dim % (last + 1) if isinstance(dim, int) else dim


def _is_slice(node: fx.Node, x: fx.Node, start: int, end: int) -> bool:
    if node.target is not aten.slice.Tensor or node.args[0] is not x or len(node.args) < 4:
        return False
    size = shape(x)[-1]
    given_start, given_end = node.args[2] or 0, node.args[3]
    if not isinstance(given_start, int) or not isinstance(given_end, int) or len(node.args) > 4:
        return False
    right_dim = _dim(node, 1, rank(x) - 1) == rank(x) - 1
    return right_dim and given_start % size == start and min(given_end, size) == end


def _angle(node: fx.Node, function: object) -> fx.Node | None:
    """The operand of the cos (or sin) that ``node`` is, seen through views and a scaling by 1."""
    while node.target in _SEE_THROUGH or (node.target is aten.mul.Tensor and node.args[1] == 1.0):
        node = node.all_input_nodes[0]
    return node.all_input_nodes[0] if node.target is function else None


def _halves_equal(angle: fx.Node) -> bool:
    """Whether the graph shows that both halves of the last dim are equal."""
    if angle.target is aten.cat.default:
        parts = angle.args[0]
        last = rank(angle) - 1
        assert isinstance(parts, list | tuple), "the parts are a list"
        return len(parts) == 2 and parts[0] is parts[1] and _dim(angle, 1, last) == last
    return angle.target is aten.view.default and _is_doubled(angle)


def _is_doubled(view: fx.Node) -> bool:
    """Whether the view is ``view(expand(unsqueeze(f, -2)))``: two copies of f in a row."""
    inner = view.all_input_nodes[0]
    if inner.target is aten.clone.default:
        inner = inner.all_input_nodes[0]
    if inner.target is not aten.expand.default:
        return False
    *_, copies, half = shape(inner)
    before = shape(inner.all_input_nodes[0])
    return (
        (copies, half) == (2, shape(view)[-1] // 2)
        and tuple(before[-2:]) == (1, half)
        and rank(view) == rank(inner) - 1
    )
