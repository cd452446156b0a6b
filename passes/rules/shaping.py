"""Factories, views and broadcasts: a size argument becomes its cap."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from zgcompile.errors import UnsupportedOp
from zgcompile.ir.bounded import Bounded, Pad, Size
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

aten = torch.ops.aten


def refuse(node: Node, what: str, advice: str) -> UnsupportedOp:
    return UnsupportedOp(f"{node.target}: {what}", where=user_line_from_stack_trace(node.meta.get("stack_trace") or ""), advice=advice)


@rule(
    "zeros.default", "new_zeros.default",
)  # fmt: skip
def zeros(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """The whole cap is zero."""
    return node.target(*context.raw(args), **context.raw(kwargs)), Pad.ZERO  # type: ignore[operator]


@rule("ones.default", "empty.memory_format", "new_ones.default", "new_empty.default", "new_empty_strided.default", "expand.default")
def sized(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Size arguments become caps; the contents are the same at every row."""
    return node.target(*context.raw(args), **context.raw(kwargs))  # type: ignore[operator]


@rule("full.default", "new_full.default")
def full(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """The size becomes its cap, a symbolic fill value is data."""
    *head, size, value = args
    fill = context.scalar(value)
    if isinstance(fill, torch.Tensor):
        out = node.meta["val"]
        return fill.to(out.dtype).expand(context.caps_of(size)).clone()
    return node.target(*context.raw(head), context.raw(size), fill, **context.raw(kwargs))  # type: ignore[operator]


@rule("empty_strided.default")
def empty_strided(context: Context, node: Node, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Strides follow from the caps."""
    del stride
    return torch.empty(context.caps_of(size), **{k: v for k, v in kwargs.items() if k in ("dtype", "device")})


def _prefix(sizes: tuple[int | sympy.Expr, ...]) -> tuple[int, sympy.Expr] | None:
    """The product of the static sizes in front of the first dynamic one, and that one."""
    product = 1
    for size in sizes:
        if not isinstance(size, int):
            return product, size
        product *= size
    return None


@rule("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default")
def view(context: Context, node: Node, source: Any, shape: Any) -> Any:
    """A dynamic dimension may be merged or split only where every index in front of it keeps its place: as the leading one,
    or behind the same static prefix. Elsewhere pads would come between valid elements."""
    sizes = tuple(context.size(s) for s in node.meta["val"].shape)
    if isinstance(source, Bounded):
        before, after = _prefix(source.sizes), _prefix(sizes)
        if len(source.dynamic()) > 1 or before is None or after is None or before[0] != after[0]:
            if not _same_dynamic_dims(source.sizes, sizes):
                raise refuse(
                    node,
                    f"a view from {list(source.sizes)} to {list(sizes)} would move rows of a dynamic dimension",
                    "keep the dynamic dimension in front (transpose first)",
                )
        keeps = source.pad if source.pad is not Pad.IN_RANGE else Pad.IN_RANGE
        return source.data.reshape(context.caps_of(sizes)), keeps
    return source.reshape(context.caps_of(sizes))


def _same_dynamic_dims(a: tuple[int | sympy.Expr, ...], b: tuple[int | sympy.Expr, ...]) -> bool:
    """Only dimensions of size one come or go."""
    return [s for s in a if s != 1] == [s for s in b if s != 1]


@rule("repeat.default")
def repeat(context: Context, node: Node, source: Any, repeats: Any) -> Any:
    """Static dimensions may be repeated."""
    lead = len(repeats) - len(context.sizes_of(source))
    if isinstance(source, Bounded):
        for d in source.dynamic():
            if isinstance(repeats[lead + d], Size) or repeats[lead + d] != 1:
                raise refuse(node, "a dynamic dimension is repeated", "use torch.cat or repeat_interleave")
        if any(not isinstance(r, Size) and r != 1 for r in repeats[:lead]) and source.dynamic()[:1] == [0] and lead:
            return context.raw(source).repeat(context.raw(repeats))
    return context.raw(source).repeat(context.raw(repeats))


@rule("arange.default", "arange.start", "arange.start_step")
def arange(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """As many values as the cap allows; a device start shifts them."""
    out = node.meta["val"]
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    steps = torch.arange(context.cap(out.shape[0]), device=out.device)
    start, step = context.scalar(start), context.scalar(step)
    steps = steps if isinstance(step, int) and step == 1 else steps * step
    return (steps if isinstance(start, int) and start == 0 else steps + start).to(out.dtype)


@rule(
    "unsqueeze.default", "transpose.int", "t.default", "permute.default", "squeeze.dims", "squeeze.dim", "unsqueeze_copy.default",
    "t_copy.default", "permute_copy.default", "transpose_copy.int", "diagonal.default", "alias_copy.default",
)  # fmt: skip
def moved(context: Context, node: Node, source: Any, *args: Any, **kwargs: Any) -> Any:
    """The dynamic dimension only moves."""
    _check_squeeze(context, node, source, args)
    pad = source.pad if isinstance(source, Bounded) else Pad.ANY
    return node.target(context.raw(source), *context.raw(args), **context.raw(kwargs)), pad  # type: ignore[operator]


@rule("squeeze.default")
def squeeze(context: Context, node: Node, source: Any) -> Any:
    """Static dimensions of size one go; a dynamic one stays, on the condition that it is not one."""
    _check_squeeze(context, node, source, ())
    return source.data.reshape(context.caps_of(node.meta["val"].shape)), source.pad


def _check_squeeze(context: Context, node: Node, source: Any, args: tuple[Any, ...]) -> None:
    """Eager drops a dimension that happens to be one, so such a batch is not the traced step."""
    from zgcompile.ir.status import Failure

    name = str(node.target)
    if "squeeze" not in name or "unsqueeze" in name or not isinstance(source, Bounded):
        return
    rank = source.dim()
    dims = range(rank) if not args else [d % rank for d in (args[0] if isinstance(args[0], (list, tuple)) else [args[0]])]
    for d in dims:
        if d in source.dynamic():
            context.check(context.count_tensor(source.sizes[d]) == 1, Failure.PRECONDITION, "squeeze of a dimension of size 1", node)
