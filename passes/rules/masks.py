"""Boolean selection: one compaction a mask, the positions of its True elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Pad


def compact(context: Context, node: Node, mask: Bounded | torch.Tensor, at: int = 0) -> torch.Tensor:
    """Flat positions of the True elements of `mask`, at the cap of the symbol that `node` gives their number (dimension
    `at`)."""
    output = node.meta["val"]
    born = list(node.meta.get("unbacked_bindings") or {})
    symbol = born[0] if born else context.size(output.shape[at])
    flags = context.raw(mask)
    key = (id(flags), context.size(symbol))
    if key not in context.compactions:
        flat, total = _flattened(context, mask)
        positions, count = torch.ops.zgcompile.compact(flat, total, context.cap(symbol))
        if born:
            context.bind_symbol(symbol, count, node)
        context.compactions[key] = flags, positions
    return context.compactions[key][1]


def is_count_of(context: Context, mask: Bounded | torch.Tensor, size: Any) -> bool:
    """Whether `size` is the number of True elements of this very mask."""
    return (id(context.raw(mask)), size) in context.compactions


def _flattened(context: Context, mask: Bounded | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The flags in one dimension and how many of them count: pads are behind that number, or False."""
    flags = context.bounded(mask)
    if flags.dynamic() == [0]:
        return flags.data.to(torch.bool).reshape(-1), context.count_tensor(flags.sizes[0]) * math.prod(
            flags.data.shape[1:]
        )
    data = context.select(flags, False).to(torch.bool)
    return data.reshape(-1), torch.full((), data.numel(), dtype=torch.int64, device=data.device)


@rule("nonzero.default")
def nonzero(context: Context, node: Node, source: Any) -> Any:
    """Positions of nonzero elements: one compaction, then the index of each dimension."""
    data = context.raw(source)
    flags = (
        source
        if data.dtype == torch.bool
        else Bounded(data != 0, source.sizes)
        if isinstance(source, Bounded)
        else data != 0
    )
    positions = compact(context, node, flags)
    columns = []
    for size in reversed(data.shape):
        columns.append(positions % size)
        positions = positions // size
    return torch.stack(columns[::-1], 1) if columns else positions.new_zeros((positions.shape[0], 0)), Pad.ZERO


@rule("masked_select.default")
def masked_select(context: Context, node: Node, source: Any, mask: Any) -> Any:
    """`source[mask]` flat, source and mask broadcast."""
    data, flags = torch.broadcast_tensors(context.raw(source), context.select(mask, False))
    sizes = _broadcast_sizes(node, context.sizes_of(source), context.sizes_of(mask))
    wide = mask if context.raw(mask).shape == flags.shape else Bounded(flags, sizes)
    return data.reshape(-1).index_select(0, compact(context, node, wide))


def _broadcast_sizes(node: Node, a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    sizes = []
    for x, y in pairs:
        if x not in (1, y) and y != 1:
            raise refuse(node, "mask and source have different dynamic sizes", "index with the mask: x[mask]")
        sizes.append(y if x == 1 else x)
    return tuple(sizes)


def true_rank(flags: torch.Tensor) -> torch.Tensor:
    """How many True elements come before each element, in memory order."""
    wide = flags.reshape(-1).to(torch.int64)
    return (wide.cumsum(0) - wide).reshape(flags.shape)
