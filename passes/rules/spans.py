"""How value ranges of integer tensors pass through ops; an op that is not listed proves nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from zgcompile.ir.bounded import as_size
from zgcompile.ir.sizes import upper_bound
from zgcompile.ir.spans import INT64_HIGH, INT64_LOW, UNKNOWN, Span, span_of

aten = torch.ops.aten


class SizeBounds:
    """Caps of sizes while they are still being found."""

    def __init__(self, shape_env: Any, caps: dict[sympy.Symbol, int]) -> None:
        self.shape_env, self.caps = shape_env, caps

    def expr(self, size: Any) -> int | sympy.Expr:
        expr = as_size(size)
        if isinstance(expr, int):
            return expr
        expr = self.shape_env.replace(expr)
        return int(expr) if expr.is_Integer else expr

    def cap(self, size: Any) -> int:
        return upper_bound(self.expr(size), self.caps)

    def numel(self, node: Node) -> int:
        total = 1
        for size in node.meta["val"].shape:
            total *= self.cap(size)
        return total


def _value(argument: Any) -> Span:
    if isinstance(argument, bool):
        return Span(int(argument), int(argument) + 1)
    if isinstance(argument, int):
        return Span(argument, argument + 1)
    return span_of(argument)


def _make(low: int, high: int, below: sympy.Expr | None = None, dtype: torch.dtype = torch.int64) -> Span:
    """[low, high) where the type holds it; arithmetic that may leave the type wraps round, which proves nothing."""
    held = torch.iinfo(dtype) if dtype != torch.bool else torch.iinfo(torch.uint8)
    return Span(low, high, below) if held.min <= low and high - 1 <= held.max else UNKNOWN


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def _source(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    return span_of(node.args[0])


def _joined(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    spans = [span_of(piece) for piece in node.args[0]]  # type: ignore[union-attr]
    result = spans[0]
    for span in spans[1:]:
        result = result.union(span)
    return result


def _arange(node: Node, bounds: SizeBounds) -> Span:
    size = bounds.expr(node.meta["val"].shape[0])
    cap = upper_bound(size, bounds.caps)
    if len(node.args) == 1:
        return _make(0, cap, None if isinstance(size, int) else size)
    start, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    return _make(start, start + cap) if isinstance(start, int) and step == 1 else UNKNOWN


def _clamp(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    span = span_of(node.args[0])
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    low, high = given.get("min"), given.get("max")
    first, last = span.low, span.high - 1
    if isinstance(low, int):
        first, last = max(first, low), max(last, low)
    elif low is not None:
        return UNKNOWN
    if isinstance(high, int):
        first, last = min(first, high), min(last, high)
    keeps_below = high is None or isinstance(high, int)
    # A value that is raised to 0 stays below a size: there is a value, so the size is not 0.
    return Span(first, last + 1, span.below if keeps_below and (low is None or low <= 0) else None)


def _where(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    return _value(node.args[1]).union(_value(node.args[2]))


def _arithmetic(op: Callable[[int, int], int]) -> Callable[[Node, SizeBounds], Span]:
    def rule(node: Node, bounds: SizeBounds) -> Span:
        del bounds
        a, b = _value(node.args[0]), _value(node.args[1])
        if node.kwargs.get("alpha", 1) != 1 or not (_bounded(a) and _bounded(b)):
            return UNKNOWN
        ends = [op(x, y) for x in (a.low, a.high - 1) for y in (b.low, b.high - 1)]
        return _make(min(ends), max(ends) + 1, None, _dtype(node))

    return rule


def _bounded(span: Span) -> bool:
    return span.low > INT64_LOW and span.high < INT64_HIGH


def _total(node: Node, bounds: SizeBounds) -> Span:
    source = node.args[0]
    span = span_of(source)
    if not _bounded(span):
        return UNKNOWN
    n = bounds.numel(source)  # type: ignore[arg-type]
    return _make(min(0, span.low * n), max(0, (span.high - 1) * n) + 1, None, _dtype(node))


def _rows(node: Node, bounds: SizeBounds) -> Span:
    """repeat_interleave: an index into its repeats."""
    size = bounds.expr(node.args[0].meta["val"].shape[0])  # type: ignore[union-attr]
    return _make(0, max(upper_bound(size, bounds.caps), 1), None if isinstance(size, int) else size)


def _positions(node: Node, bounds: SizeBounds) -> Span:
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    sizes = [bounds.expr(s) for s in shape]
    only = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else None
    return _make(0, max([upper_bound(s, bounds.caps) for s in sizes] or [1]), only)


def _filled(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    op = node.target._opname  # type: ignore[union-attr]
    fill = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}.get(op)
    value = fill if fill is not None else node.args[-1] if "full" in op else None
    return _value(value) if isinstance(value, int) else UNKNOWN


def _arg_extreme(node: Node, bounds: SizeBounds) -> Span:
    dim = node.args[1] if len(node.args) > 1 else None
    if dim is None:
        return UNKNOWN
    size = bounds.expr(node.args[0].meta["val"].shape[dim])  # type: ignore[union-attr]
    return _make(0, max(upper_bound(size, bounds.caps), 1), None if isinstance(size, int) else size)


def _written(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    values = node.args[2] if "index_put" in str(node.target) else node.args[3]
    accumulates = len(node.args) > 3 and "index_put" in str(node.target) and bool(node.args[3])
    return UNKNOWN if accumulates else span_of(node.args[0]).union(_value(values))


def _remainder(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    divisor = node.args[1]
    return _make(0, divisor) if isinstance(divisor, int) and divisor > 0 else UNKNOWN


def _floor(node: Node, bounds: SizeBounds) -> Span:
    """Division by a positive number, rounded down or towards zero: neither moves an end of the range outwards."""
    del bounds
    span, divisor = span_of(node.args[0]), node.args[1]
    mode = node.kwargs.get("rounding_mode", "floor")
    if not isinstance(divisor, int) or divisor <= 0 or mode not in ("floor", "trunc") or not _bounded(span):
        return UNKNOWN
    return Span(span.low // divisor, (span.high - 1) // divisor + 1 if span.high > 0 else 1)


def _cast(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    source = node.args[0]
    if source.meta["val"].dtype.is_floating_point:  # type: ignore[union-attr]
        return UNKNOWN
    span = span_of(source)
    return _make(span.low, span.high, span.below, _dtype(node))


def _order(node: Node) -> tuple[Node, int]:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given["self"], given.get("dim", -1)


def _places(node: Node, bounds: SizeBounds) -> Span:
    """Indices into the sorted dimension."""
    source, dim = _order(node)
    size = bounds.expr(source.meta["val"].shape[dim])
    return _make(0, max(upper_bound(size, bounds.caps), 1), None if isinstance(size, int) else size)


def _found(node: Node, bounds: SizeBounds) -> Span:
    """A place in a sorted sequence, its end included."""
    sequence = node.args[1 if "bucketize" in str(node.target) else 0]
    return _make(0, bounds.cap(sequence.meta["val"].shape[-1]) + 1, None, _dtype(node))  # type: ignore[union-attr]


def _extreme(node: Node, bounds: SizeBounds) -> Span:
    del bounds
    a, b = _value(node.args[0]), _value(node.args[1])
    pick = max if "maximum" in str(node.target) else min
    return Span(pick(a.low, b.low), pick(a.high, b.high))


_SAME = (
    "index.Tensor", "index_select.default", "gather.default", "slice.Tensor", "select.int",
    "view.default", "_unsafe_view.default",
    "reshape.default", "expand.default", "clone.default", "unsqueeze.default", "squeeze.dim",
    "squeeze.dims", "squeeze.default",
    "t.default", "permute.default", "transpose.int", "flip.default", "repeat.default",
    "masked_select.default", "amax.default",
    "amin.default", "max.default", "min.default", "unbind.int", "split.Tensor",
)  # fmt: skip
_RULES: list[tuple[tuple[str, ...], Callable[[Node, SizeBounds], Span]]] = [
    (_SAME, _source),
    (("cat.default", "stack.default"), _joined),
    (("arange.default", "arange.start", "arange.start_step"), _arange),
    (("clamp.default", "clamp_min.default", "clamp_max.default"), _clamp),
    (("where.self",), _where),
    (("add.Tensor", "add.Scalar"), _arithmetic(operator.add)),
    (("sub.Tensor", "sub.Scalar"), _arithmetic(operator.sub)),
    (("mul.Tensor", "mul.Scalar"), _arithmetic(operator.mul)),
    (("sum.default", "sum.dim_IntList", "cumsum.default"), _total),
    (("repeat_interleave.Tensor",), _rows),
    (("nonzero.default",), _positions),
    (
        (
            "zeros.default",
            "new_zeros.default",
            "zeros_like.default",
            "ones.default",
            "ones_like.default",
            "full.default",
            "full_like.default",
            "new_full.default",
        ),
        _filled,
    ),
    (("argmax.default", "argmin.default"), _arg_extreme),
    (("index_put.default", "scatter.src", "scatter.value"), _written),
    (("remainder.Scalar",), _remainder),
    (("floor_divide.default", "div.Tensor_mode"), _floor),
    (("_to_copy.default",), _cast),
    (("argsort.default", "argsort.stable"), _places),
    (("searchsorted.Tensor", "bucketize.Tensor"), _found),
    (("maximum.default", "minimum.default"), _extreme),
]
_TABLE: dict[Any, Callable[[Node, SizeBounds], Span]] = {
    getattr(getattr(aten, name.partition(".")[0]), name.partition(".")[2]): rule
    for names, rule in _RULES
    for name in names
    if hasattr(getattr(aten, name.partition(".")[0]), name.partition(".")[2])
}


def transfer(node: Node, bounds: SizeBounds) -> None:
    """Notes `meta["span"]` (or `meta["spans"]` for several results) on a node whose inputs have theirs."""
    value: Any = node.meta.get("val")
    node.meta.pop("span", None)
    if node.target is aten._unique2.default:
        size = bounds.expr(value[0].shape[0])
        cap = upper_bound(size, bounds.caps)
        counted = _make(0, bounds.numel(node.args[0]) + 1)  # type: ignore[arg-type]
        node.meta["spans"] = [
            span_of(node.args[0]),
            _make(0, max(cap, 1), None if isinstance(size, int) else size),
            counted,
        ]
    elif node.target in (aten.sort.default, aten.sort.stable, aten.topk.default):
        node.meta["spans"] = [span_of(node.args[0]), _places(node, bounds)]
    elif node.target is operator.getitem:
        source, index = node.args
        spans = source.meta.get("spans")  # type: ignore[union-attr]
        node.meta["span"] = spans[index] if spans else span_of(source)
    elif isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        node.meta["span"] = Span(0, 2)
    elif isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        rule = _TABLE.get(node.target)
        node.meta["span"] = rule(node, bounds) if rule else UNKNOWN
