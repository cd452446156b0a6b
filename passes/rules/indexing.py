"""Reads by index: a pad index reads element 0, a dynamic source is never read past its cap."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import IDS, Context
from zgcompile.passes.rules.masks import compact
from zgcompile.passes.rules.table import refuse, rule
from zgcompile.passes.rules.views import linear

from zgcompile.ir.bounded import Bounded, Pad

MASKS = (torch.bool, torch.uint8)


def _read(source: Any, data: torch.Tensor) -> Any:
    """Integers read from a table without pads are in its value range, at pads too."""
    return (data, Pad.IN_RANGE) if not isinstance(source, Bounded) and data.dtype in IDS else data


@rule("index_select.default")
def index_select(context: Context, node: Node, source: Any, dim: int, index: Any) -> Any:
    safe = context.index(node, index, node.args[2], context.sizes_of(source)[dim])
    return _read(source, context.raw(source).index_select(dim, safe))


@rule("gather.default")
def gather(context: Context, node: Node, source: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    del sparse_grad
    safe = context.index(node, index, node.args[2], context.sizes_of(source)[dim])
    data = context.raw(source)
    for d in range(data.dim()):  # gather lets the source be larger than the index elsewhere, caps may be so by chance
        if d != dim % data.dim() and data.shape[d] > safe.shape[d]:
            data = data.narrow(d, 0, safe.shape[d])
    return _read(source, data.gather(dim, safe))


@rule("embedding.default")
def embedding(context: Context, node: Node, weight: Any, index: Any, *options: Any) -> torch.Tensor:
    safe = context.index(node, index, node.args[1], context.sizes_of(weight)[0])
    return node.target(context.raw(weight), safe, *options)  # type: ignore[operator]


@rule("take.default")
def take(context: Context, node: Node, source: Any, index: Any) -> Any:
    """An index into the flattened source, whose rows are as long as they truly are."""
    sizes, data = context.sizes_of(source), context.raw(source)
    total = sizes[0] if len(sizes) == 1 else None
    if total is None:
        total = 1
        for size in sizes:
            total = total * size
    safe = context.index(node, index, node.args[1], total, wraps=True)
    return _read(source, data.reshape(-1)[linear(context, safe, sizes, data.shape).clamp(0, max(data.numel() - 1, 0))])


@rule("index.Tensor")
def index(context: Context, node: Node, source: Any, indices: list[Any]) -> Any:
    """`source[i, j, ...]`; one boolean mask is a compaction."""
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    masked = [d for d, i in used if i.dtype in MASKS]
    if not masked:
        sizes = context.sizes_of(source)
        nodes: Any = node.args[1]
        safe = [
            None if i is None else context.index(node, i, nodes[d], sizes[d], wraps=True) for d, i in enumerate(indices)
        ]
        return _read(source, torch.ops.aten.index.Tensor(context.raw(source), safe))
    if len(used) > 1:
        raise refuse(
            node, "a boolean mask together with other indices", "select with the mask first, then index the result"
        )
    at, mask = used[0]
    data, rank = context.raw(source), mask.dim()
    flat = data.reshape(*data.shape[:at], -1, *data.shape[at + rank :])
    return _read(source, flat.index_select(at, compact(context, node, mask, at)))
