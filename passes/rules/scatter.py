"""Writes by index: pads go nowhere. Accumulation adds zeros for them, assignment is gated by the count."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded, Size
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.indexing import _place
from zgcompile.passes.rules.shaping import refuse
from zgcompile.passes.rules.table import rule


@rule("index_add.default")
def index_add(context: Context, node: Node, target: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> torch.Tensor:
    safe = _spread(context, node, index, node.args[2], context.sizes_of(target)[dim])
    values = context.select(source, 0, [dim])
    alpha = context.scalar(alpha)
    return context.raw(target).index_add(dim, safe, values if isinstance(alpha, int) and alpha == 1 else values * alpha)


def _spread(context: Context, node: Node, index: Any, index_node: Any, size: Any) -> torch.Tensor:
    """Safe indices; pads, whose values are the identity, are spread over the rows so that no one row collects their atomics."""
    safe = context.index(node, index, index_node, size)
    if not isinstance(index, Bounded) or index.dim() != 1:
        return safe
    rows = max(context.cap(size), 1)
    spread = torch.arange(safe.shape[0], device=safe.device) % rows
    return torch.where(context.valid(index.sizes[0]), safe, spread.to(safe.dtype))


@rule("scatter_add.default")
def scatter_add(context: Context, node: Node, target: Any, dim: int, index: Any, source: Any) -> torch.Tensor:
    safe = context.index(node, index, node.args[2], context.sizes_of(target)[dim])
    return context.raw(target).scatter_add(dim, safe, _identity_pads(context, index, source, 0))


def _identity_pads(context: Context, index: Any, source: Any, fill: Any) -> torch.Tensor:
    """Values with `fill` wherever the index is a pad."""
    values = context.raw(source)
    mask = context.all_valid(index) if isinstance(index, Bounded) else None
    for d in range(values.dim()):
        if values.shape[d] > context.raw(index).shape[d]:
            values = values.narrow(d, 0, context.raw(index).shape[d])
    return values if mask is None else torch.where(mask, values, torch.full((), fill, dtype=values.dtype, device=values.device))


@rule("scatter_reduce.two")
def scatter_reduce(context: Context, node: Node, target: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> torch.Tensor:
    """Pads go to a dump row behind the target: an identity would do for sums, not for a mean's count."""
    data, index_data = _dumped(context, node, target, dim, index, node.args[2])
    values = _identity_pads(context, index, source, 0)
    rows = context.raw(target).shape[dim]
    return node.target(data, dim, index_data, values, reduce, include_self=include_self).narrow(dim, 0, rows)  # type: ignore[operator]


@rule("scatter.src", "scatter.value")
def scatter(context: Context, node: Node, target: Any, dim: int, index: Any, value: Any, **options: Any) -> torch.Tensor:
    """Pads go to a dump row behind the target."""
    data, index_data = _dumped(context, node, target, dim, index, node.args[2])
    values = context.raw(value) if isinstance(value, (Bounded, torch.Tensor)) else context.scalar(value)
    rows = context.raw(target).shape[dim]
    return node.target(data, dim, index_data, values, **options).narrow(dim, 0, rows)  # type: ignore[operator]


def _dumped(context: Context, node: Node, target: Any, dim: int, index: Any, index_node: Any) -> tuple[torch.Tensor, torch.Tensor]:
    data = context.raw(target)
    safe = context.index(node, index, index_node, context.sizes_of(target)[dim])
    mask = context.all_valid(index) if isinstance(index, Bounded) else None
    if mask is not None:
        safe = torch.where(mask, safe, data.shape[dim])
    dump = torch.zeros_like(data.narrow(dim, 0, 1)) if data.shape[dim] else data.new_zeros([1 if d == dim else s for d, s in enumerate(data.shape)])
    return torch.cat([data, dump], dim), safe


@rule("index_put.default", "_unsafe_index_put.default")
def index_put(context: Context, node: Node, target: Any, indices: list[Any], values: Any, accumulate: bool = False) -> torch.Tensor:
    data = context.raw(target)
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for _, i in used):
        return _masked_put(context, node, target, indices, values, accumulate)
    sizes = context.sizes_of(target)
    safe = [None if i is None else context.index(node, i, node.args[1][d], sizes[d]) for d, i in enumerate(indices)]  # type: ignore[index]
    mask = None
    for _, i in used:
        along = context.all_valid(i) if isinstance(i, Bounded) else None
        mask = along if mask is None or along is None else mask & along
        mask = mask if mask is not None else along
    if mask is None:
        return node.target(data, safe, context.raw(values), accumulate)  # type: ignore[operator]
    if used != [(0, indices[0])]:
        return _put_by_flat_row(context, node, data, safe, used, values, mask, accumulate)
    if accumulate:
        inner = data.dim() - 1
        fill = _broadcast_values(context, values, [*safe[0].shape, *data.shape[1:]])  # type: ignore[union-attr]
        fill = torch.where(mask.reshape(*mask.shape, *[1] * inner), fill, torch.zeros((), dtype=fill.dtype, device=fill.device))
        return torch.ops.aten.index_put.default(data, safe, fill, True)
    rows = _broadcast_values(context, values, [*safe[0].shape, *data.shape[1:]])  # type: ignore[union-attr]
    index = indices[0]
    if index.dim() != 1:
        raise refuse(node, "assignment through a multi-dimensional dynamic index", "flatten the index and the values first")
    return torch.ops.zgcompile.index_put(data, safe[0], rows, context.count_tensor(index.sizes[0]))


def _broadcast_values(context: Context, values: Any, shape: list[int]) -> torch.Tensor:
    return context.raw(values).expand(shape)


def _put_by_flat_row(context: Context, node: Node, data: torch.Tensor, safe: list[Any], used: list[Any], values: Any, mask: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """`target[i, j] = v` for leading indices i, j: one flat row index."""
    if [d for d, _ in used] != list(range(len(used))):
        raise refuse(node, "indices behind an untouched dimension", "permute so that the indexed dimensions lead")
    index = safe[0]
    for d in range(1, len(used)):
        index = index * data.shape[d] + safe[d]
    flat = data.reshape(-1, *data.shape[len(used) :])
    rows = _broadcast_values(context, values, [*index.shape, *flat.shape[1:]])
    inner = [1] * (flat.dim() - 1)
    if accumulate:
        rows = torch.where(mask.reshape(*mask.shape, *inner), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
        return torch.ops.aten.index_put.default(flat, [index], rows, True).reshape(data.shape)
    bounded = next(i for _, i in used if isinstance(i, Bounded))
    if bounded.dim() != 1:
        raise refuse(node, "assignment through a multi-dimensional dynamic index", "flatten the index and the values first")
    return torch.ops.zgcompile.index_put(flat, index, rows, context.count_tensor(bounded.sizes[0])).reshape(data.shape)


def _masked_put(context: Context, node: Node, target: Any, indices: list[Any], values: Any, accumulate: bool) -> torch.Tensor:
    """`target[mask] = values`: each True element takes the value of its rank; no scatter is needed."""
    if len([i for i in indices if i is not None]) != 1 or indices[0] is None:
        raise refuse(node, "a boolean mask together with other indices", "use torch.where")
    data, mask = context.raw(target), indices[0]
    flags = context.select(mask, False)
    rank = flags.dim()
    wide = flags.reshape(*flags.shape, *[1] * (data.dim() - rank))
    rows = context.raw(values)
    if rows.dim() > data.dim() - rank:
        place = (flags.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(0, max(rows.shape[0] - 1, 0)).reshape(flags.shape)
        if not isinstance(values, Bounded) and rows.shape[0] != 1:
            from zgcompile.ir.status import Failure

            context.check(flags.sum() != rows.shape[0], Failure.USER_ERROR, "shape mismatch in a masked assignment", node)
        rows = rows[place] if rows.shape[0] else data
    return torch.where(wide, (data + rows if accumulate else rows).to(data.dtype), data)


@rule("masked_scatter.default")
def masked_scatter(context: Context, node: Node, target: Any, mask: Any, source: Any) -> torch.Tensor:
    """The k-th True element takes the k-th element of the source."""
    data = context.raw(target)
    flags = context.select(mask, False).expand(data.shape)
    flat = context.raw(source).reshape(-1)
    place = (flags.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp(0, max(flat.shape[0] - 1, 0)).reshape(flags.shape)
    return torch.where(flags, flat[place], data)


@rule("select_scatter.default")
def select_scatter(context: Context, node: Node, target: Any, source: Any, dim: int, index: Any) -> torch.Tensor:
    data, size = context.raw(target), context.sizes_of(target)[dim]
    if isinstance(size, int) and isinstance(index, int):
        return node.target(data, context.raw(source), dim, index)  # type: ignore[operator]
    count = context.count_tensor(size)
    place = context.count_tensor(index) if isinstance(index, Size) else torch.full_like(count, index)
    place = torch.where(place < 0, place + count, place)
    hit = torch.arange(data.shape[dim], device=data.device) == place
    return torch.where(hit.view([-1 if d == dim % data.dim() else 1 for d in range(data.dim())]), context.raw(source).unsqueeze(dim), data)


@rule("slice_scatter.default")
def slice_scatter(context: Context, node: Node, target: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> torch.Tensor:
    """Row j of the target takes row j - start of the source while j is inside the slice."""
    data, values = context.raw(target), context.raw(source)
    if step != 1:
        raise refuse(node, "assignment to a strided slice of a dynamic dimension", "assign through an index tensor")
    size = context.sizes_of(target)[dim]
    first, last = _place(context, start, size, 0), _place(context, end, size, None)
    row = torch.arange(data.shape[dim], device=data.device)
    inside = (row >= first) & (row < last)
    moved = values.index_select(dim, (row - first).clamp(0, max(values.shape[dim] - 1, 0)))
    return torch.where(inside.view([-1 if d == dim % data.dim() else 1 for d in range(data.dim())]), moved, data)


@rule("embedding_dense_backward.default")
def embedding_dense_backward(context: Context, node: Node, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool) -> torch.Tensor:
    """Pad rows carry a zero gradient."""
    safe = context.index(node, index, node.args[1], rows)
    if by_frequency:
        raise refuse(node, "scale_grad_by_freq with a dynamic batch", "leave scale_grad_by_freq off")
    clean = _identity_pads(context, Bounded(grad.data, grad.sizes), grad, 0) if isinstance(grad, Bounded) else grad
    return node.target(clean, safe, rows, padding, by_frequency)  # type: ignore[operator]


