"""Joining and splitting: pieces of a dynamic dimension close up, with no pads between them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context, along, rows_at
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Size


@rule("cat.default")
def cat(context: Context, node: Node, pieces: list[Any], dim: int = 0) -> torch.Tensor:
    """Where only the last piece is dynamic a plain copy; else row j comes from the piece that its rank falls in."""
    out = node.meta["val"]
    dim %= out.dim()
    pieces = [p for p in pieces if context.raw(p).dim() == out.dim()]  # ATen lets a 1-D empty tensor join anything
    sizes = [context.sizes_of(p)[dim] for p in pieces]
    data = [context.raw(p).to(out.dtype) for p in pieces]
    if all(isinstance(s, int) for s in sizes[:-1]):
        return torch.cat(data, dim)
    counts = torch.stack([context.count_tensor(s) for s in sizes])
    cap = context.cap(out.shape[dim])
    if dim == 0:
        return torch.ops.zgcompile.concat(data, counts, cap)
    return torch.ops.zgcompile.concat([d.movedim(dim, 0).contiguous() for d in data], counts, cap).movedim(0, dim)


@rule("stack.default")
def stack(context: Context, node: Node, pieces: list[Any], dim: int = 0) -> torch.Tensor:
    """A new static dimension; every piece has the same sizes."""
    del node
    return torch.stack([context.raw(p) for p in pieces], dim)


@rule("unbind.int")
def unbind(context: Context, node: Node, source: Bounded, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """The number of results is fixed, so the dimension is static."""
    del node
    return tuple(context.raw(source).unbind(dim))


@rule("split.Tensor")
def split(context: Context, node: Node, source: Bounded, length: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
    if not isinstance(source.sizes[dim], int) or isinstance(length, Size):
        raise refuse(node, "a dynamic dimension is split into equal pieces", "slice it: x[:k], x[k:]")
    return tuple(context.raw(source).split(length, dim))


@rule("split_with_sizes.default")
def split_with_sizes(
    context: Context, node: Node, source: Any, lengths: list[Any], dim: int = 0
) -> tuple[torch.Tensor, ...]:
    """Each piece starts at the true end of the one before."""
    del node
    data, start, pieces = context.raw(source), 0, []
    for length in lengths:
        rows = start + torch.arange(context.cap(length), device=data.device)
        pieces.append(rows_at(data, dim, rows))
        start = start + context.scalar(length)
    return tuple(pieces)


@rule("constant_pad_nd.default")
def constant_pad(context: Context, node: Node, source: Bounded, widths: list[Any], value: Any = 0) -> torch.Tensor:
    """Behind a dynamic dimension the filling starts at the true end; a negative width cuts."""
    if any(not isinstance(w, int) for w in widths):
        raise refuse(node, "padding by a device width", "use torch.cat with torch.full")
    fill = context.scalar(value)
    data = torch.constant_pad_nd(source.data, widths, 0)
    filled = (
        torch.full((), fill, dtype=data.dtype, device=data.device)
        if not isinstance(fill, torch.Tensor)
        else fill.to(data.dtype)
    )
    inside = None
    for d in range(source.dim()):
        k = 2 * (source.dim() - 1 - d)
        before, after = (widths[k], widths[k + 1]) if k < len(widths) else (0, 0)
        if before or after:
            row = torch.arange(data.shape[d], device=data.device) - before
            hit = along((row >= 0) & (row < context.count(source.sizes[d])), d, data.dim())
            inside = hit if inside is None else inside & hit
    return data if inside is None else torch.where(inside, data, filled)
