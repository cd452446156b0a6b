"""Reads by index: a pad index reads element 0, a dynamic source is never read past its cap."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded, Pad, Size
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.shaping import refuse
from zgcompile.passes.rules.table import rule


@rule("index_select.default")
def index_select(context: Context, node: Node, source: Any, dim: int, index: Any) -> torch.Tensor:
    sizes = context.sizes_of(source)
    return context.raw(source).index_select(dim, context.index(node, index, node.args[2], sizes[dim]))


@rule("gather.default")
def gather(context: Context, node: Node, source: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> torch.Tensor:
    del sparse_grad
    size = context.sizes_of(source)[dim]
    safe = context.index(node, index, node.args[2], size)
    return _rows_like(context.raw(source), safe, dim).gather(dim, safe)


def _rows_like(source: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """`source` cut to the index along the other dimensions, as gather allows it to be larger."""
    for d in range(source.dim()):
        if d != dim % source.dim() and source.shape[d] > index.shape[d]:
            source = source.narrow(d, 0, index.shape[d])
    return source


@rule("embedding.default")
def embedding(context: Context, node: Node, weight: Any, index: Any, *args: Any) -> torch.Tensor:
    size = context.sizes_of(weight)[0]
    return node.target(context.raw(weight), context.index(node, index, node.args[1], size), *args)  # type: ignore[operator]


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(context: Context, node: Node, source: Any, indices: list[Any]) -> torch.Tensor:
    """`source[i, j, ...]`; one boolean mask is a compaction."""
    data, sizes = context.raw(source), context.sizes_of(source)
    masks = [d for d, i in enumerate(indices) if i is not None and _dtype(i) in (torch.bool, torch.uint8)]
    if masks:
        return _masked(context, node, source, indices, masks)
    safe = [
        None if i is None else context.index(node, i, node.args[1][d], sizes[d])  # type: ignore[index]
        for d, i in enumerate(indices)
    ]
    return torch.ops.aten.index.Tensor(data, safe)


def _dtype(value: Any) -> torch.dtype:
    return value.dtype


def _masked(context: Context, node: Node, source: Any, indices: list[Any], masks: list[int]) -> torch.Tensor:
    if len([i for i in indices if i is not None]) != 1:
        raise refuse(node, "a boolean mask together with other indices", "select with the mask first, then index the result")
    at = masks[0]
    mask, data = indices[at], context.raw(source)
    rank = mask.dim()
    positions = context.compact(node, mask, at)
    flat = data.reshape(*data.shape[:at], -1, *data.shape[at + rank :])
    return flat.index_select(at, positions)


@rule("slice.Tensor", "slice_copy.Tensor")
def slice_(context: Context, node: Node, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """A slice from a static start is a view of the buffer; from a device start, a gather. Starts and ends count from the true size."""
    out = node.meta["val"]
    dim %= out.dim()
    data, sizes = context.raw(source), context.sizes_of(source)
    size, cap = sizes[dim], context.cap(out.shape[dim])
    dynamic = not isinstance(size, int)
    if not isinstance(step, int) or step != 1:
        if dynamic or isinstance(start, Size) or isinstance(end, Size):
            return _strided(context, node, data, size, dim, start, step, cap)
        return node.target(data, dim, start, end, step)  # type: ignore[operator]
    if node.meta.get("unbacked_bindings"):
        context.bind(node, (_place(context, end, size, None) - _place(context, start, size, 0)).clamp(min=0))
    if not dynamic and not isinstance(start, Size) and not isinstance(end, Size):
        return node.target(data, dim, start, end)  # type: ignore[operator]
    pad = source.pad if isinstance(source, Bounded) else Pad.ANY
    if start is None or (isinstance(start, int) and start >= 0):
        start = start or 0
        if start + cap <= data.shape[dim]:
            return data.narrow(dim, start, cap), pad
    rows = _place(context, start, size, 0) + torch.arange(cap, device=data.device)
    return data.index_select(dim, rows.clamp(0, max(data.shape[dim] - 1, 0)))


def _place(context: Context, value: Any, size: Any, default: int | None) -> torch.Tensor:
    """A slice bound counted from the front, clamped into [0, size], as a 0-d tensor."""
    limit = context.count_tensor(size)
    if value is None or (isinstance(value, int) and value >= 2**62):
        return limit if default is None else torch.zeros_like(limit)
    place = context.count_tensor(value) if isinstance(value, Size) else torch.full_like(limit, value)
    place = torch.where(place < 0, place + limit, place)
    return torch.minimum(place.clamp(min=0), limit)


def _strided(context: Context, node: Node, data: torch.Tensor, size: Any, dim: int, start: Any, step: Any, cap: int) -> torch.Tensor:
    if not isinstance(step, int):
        raise refuse(node, "a slice with a device step", "index with start + step * torch.arange(k)")
    rows = _place(context, start, size, 0) + step * torch.arange(cap, device=data.device)
    return data.index_select(dim, rows.clamp(0, max(data.shape[dim] - 1, 0)))


@rule("select.int", "select_copy.int")
def select(context: Context, node: Node, source: Any, dim: int, index: Any) -> Any:
    """One index of a dimension; a negative one counts from the true size, not from the cap."""
    from zgcompile.ir.status import Failure

    data, sizes = context.raw(source), context.sizes_of(source)
    dim %= len(sizes)
    size = sizes[dim]
    pad = source.pad if isinstance(source, Bounded) else Pad.ANY
    if isinstance(size, int) and isinstance(index, int):
        return node.target(data, dim, index), pad  # type: ignore[operator]
    count = context.count_tensor(size)
    place = context.count_tensor(index) if isinstance(index, Size) else torch.full_like(count, index)
    context.check((place >= count) | (place < -count), Failure.USER_ERROR, "index out of range in select", node)
    place = torch.where(place < 0, place + count, place).clamp(0, max(data.shape[dim] - 1, 0))
    return data.index_select(dim, place.view(1)).squeeze(dim)


@rule("flip.default")
def flip(context: Context, node: Node, source: Any, dims: list[int]) -> torch.Tensor:
    """A dynamic dimension is read backwards from its true end."""
    data = context.raw(source)
    for d in dims:
        size = context.sizes_of(source)[d]
        if isinstance(size, int):
            data = data.flip(d)
        else:
            rows = context.count(size) - 1 - torch.arange(data.shape[d], device=data.device)
            data = data.index_select(d, rows.clamp(min=0))
    return data
