"""Joining and splitting: pieces of a dynamic dimension close up, with no pads between them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.shaping import refuse
from zgcompile.passes.rules.table import rule


@rule("cat.default")
def cat(context: Context, node: Node, pieces: list[Any], dim: int = 0) -> torch.Tensor:
    """Only the last piece may be dynamic for a plain copy; else row j comes from the piece that its rank falls in."""
    out = node.meta["val"]
    dim %= out.dim()
    sizes = [context.sizes_of(p)[dim] if context.raw(p).dim() == out.dim() else 0 for p in pieces]
    data = [context.raw(p).to(out.dtype) for p in pieces]
    if all(isinstance(s, int) for s in sizes[:-1]):
        return torch.cat(data, dim)
    if dim != 0:
        return _gathered(context, data, sizes, dim)
    counts = torch.stack([context.count_tensor(s) for s in sizes])
    return torch.ops.zgcompile.concat(data, counts, context.cap(out.shape[0]))


def _gathered(context: Context, data: list[torch.Tensor], sizes: list[Any], dim: int) -> torch.Tensor:
    whole = torch.cat(data, dim)
    column = torch.arange(whole.shape[dim], device=whole.device)
    start, place, source = 0, 0, column
    for piece, size in zip(data, sizes, strict=True):
        source = torch.where(column >= start, column - start + place, source)
        start = start + context.count(size)
        place += piece.shape[dim]
    return whole.index_select(dim, source.clamp(0, max(whole.shape[dim] - 1, 0)))


@rule("stack.default")
def stack(context: Context, node: Node, pieces: list[Any], dim: int = 0) -> torch.Tensor:
    """A new static dimension; every piece has the same sizes."""
    del node
    return torch.stack([context.raw(p) for p in pieces], dim)


@rule("split.Tensor", "split_with_sizes.default", "unbind.int", "chunk.default")
def split(context: Context, node: Node, source: Bounded, *args: Any) -> Any:
    """Along a static dimension only."""
    position = 0 if "unbind" in str(node.target) else 1
    dim = args[position] if len(args) > position else 0
    if not isinstance(source.sizes[dim], int):
        raise refuse(node, "a dynamic dimension is split", "slice it: x[:k], x[k:]")
    return tuple(node.target(context.raw(source), *context.raw(args)))  # type: ignore[operator]
