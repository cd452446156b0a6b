"""Factories, permutations and broadcasts: a size argument becomes its cap."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context, rows_at
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded, Pad, Size
from zgcompile.ir.status import Failure


@rule("zeros.default", "new_zeros.default", "zeros_like.default")
def zeros(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """The whole cap is zero."""
    return node.target(*context.raw(args), **context.raw(kwargs)), Pad.ZERO  # type: ignore[operator]


@rule(
    "ones.default", "empty.memory_format", "new_ones.default", "new_empty.default", "expand.default",
    "ones_like.default", "empty_like.default",
)  # fmt: skip
def sized(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Size arguments become caps; the contents are the same at every row."""
    return node.target(*context.raw(args), **context.raw(kwargs))  # type: ignore[operator]


@rule("scalar_tensor.default")
def scalar_tensor(context: Context, node: Node, value: Any, **kwargs: Any) -> torch.Tensor:
    """A number from the device as a 0-d tensor."""
    del kwargs
    out, number = node.meta["val"], context.scalar(value)
    return (
        number.to(out.dtype)
        if isinstance(number, torch.Tensor)
        else torch.full((), number, dtype=out.dtype, device=out.device)
    )


@rule("full.default", "new_full.default", "full_like.default")
def full(context: Context, node: Node, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The size becomes its cap, a symbolic fill value is data."""
    *head, value = args
    fill = context.scalar(value)
    if isinstance(fill, torch.Tensor):
        out = node.meta["val"]
        return fill.to(out.dtype).expand(context.caps_of(out.shape)).clone()
    return node.target(*context.raw(head), fill, **context.raw(kwargs))  # type: ignore[operator]


@rule("empty_strided.default", "new_empty_strided.default")
def empty_strided(context: Context, node: Node, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Strides follow from the caps."""
    del args, kwargs
    out = node.meta["val"]
    return torch.empty(context.caps_of(out.shape), dtype=out.dtype, device=out.device)


@rule("repeat.default")
def repeat(context: Context, node: Node, source: Any, repeats: Any) -> torch.Tensor:
    """Copies of a dynamic dimension follow each other without pads in between."""
    bounded, data = context.bounded(source), context.raw(source)
    lead = len(repeats) - bounded.dim()
    static = [
        1 if d >= lead and not isinstance(bounded.sizes[d - lead], int) else context.raw(r)
        for d, r in enumerate(repeats)
    ]
    data = data.repeat(static)
    for d in bounded.dynamic():
        if isinstance(repeats[lead + d], Size) or repeats[lead + d] != 1:
            rows = torch.arange(context.cap(node.meta["val"].shape[lead + d]), device=data.device)
            data = rows_at(data, lead + d, torch.remainder(rows, context.count_tensor(bounded.sizes[d]).clamp(min=1)))
    return data


@rule("arange.default", "arange.start", "arange.start_step")
def arange(context: Context, node: Node, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As many values as the cap allows; a device start shifts them. Floats are made in float64, as ATen does."""
    del kwargs
    out = node.meta["val"]
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    start, step = context.scalar(start), context.scalar(step)
    wide = torch.float64 if out.dtype.is_floating_point else torch.int64
    steps = torch.arange(context.cap(out.shape[0]), dtype=wide, device=out.device)
    return (steps * step + start).to(out.dtype)


@rule(
    "unsqueeze.default", "transpose.int", "t.default", "permute.default",

)  # fmt: skip
def moved(context: Context, node: Node, source: Any, *args: Any) -> Any:
    """The dynamic dimension only moves."""
    return node.target(context.raw(source), *args), source.pad if isinstance(source, Bounded) else Pad.ANY  # type: ignore[operator]


@rule("diagonal.default", "tril.default", "triu.default")
def by_place(context: Context, node: Node, source: Any, *args: Any) -> torch.Tensor:
    """What an element becomes depends on its place alone."""
    return node.target(context.raw(source), *context.raw(args))  # type: ignore[operator]


@rule("squeeze.default", "squeeze.dim", "squeeze.dims")
def squeeze(context: Context, node: Node, source: Bounded, dim: Any = None) -> Any:
    """Static dimensions of size one go. Eager drops a dynamic one that happens to be one too: such a batch is not the
    traced step."""
    dims = (
        range(source.dim())
        if dim is None
        else [d % source.dim() for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    )
    for d in dims:
        if not isinstance(source.sizes[d], int):
            context.check(
                context.count_tensor(source.sizes[d]) == 1,
                Failure.PRECONDITION,
                "squeeze of a dimension of size 1",
                node,
            )
    return source.data.reshape(context.caps_of(node.meta["val"].shape)), source.pad
