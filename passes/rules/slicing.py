"""Slices and single places of a dimension, read and written: starts, ends and negative places count from the true
size."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context, along, rows_at
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Pad, Size
from zgcompile.ir.status import Failure

OPEN_END = 2**62  # what `x[a:]` has for an end is at least this


@rule("slice.Tensor")
def slice_(
    context: Context, node: Node, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """From a static start a view of the buffer, from a device start a gather."""
    out, data, size = node.meta["val"], context.raw(source), context.sizes_of(source)[dim]
    dim %= out.dim()
    if not isinstance(step, int):
        raise refuse(node, "a slice with a device step", "index with start + step * torch.arange(k)")
    if isinstance(size, int) and not isinstance(start, Size) and not isinstance(end, Size):
        return node.target(data, dim, start, end, step)  # type: ignore[operator]
    first, last = _place(context, start, size, 0), _place(context, end, size, None)
    if not (_is_open_start(start) and _is_open_end(end) and step == 1):
        context.bind_output(
            node, torch.div(last - first + (step - 1), step, rounding_mode="floor").clamp(min=0), out, dim
        )
    cap = context.cap(out.shape[dim])
    front = start or 0
    if step == 1 and isinstance(front, int) and front >= 0 and front + cap <= data.shape[dim]:
        return data.narrow(dim, front, cap), _pad_of_cut(source)
    return rows_at(data, dim, first + step * torch.arange(cap, device=data.device))


def _pad_of_cut(source: Any) -> Pad:
    """Behind the cut come valid elements of the source, so zero pads do not stay zero; what is in range stays in
    range."""
    return Pad.IN_RANGE if isinstance(source, Bounded) and source.pad is not Pad.ANY else Pad.ANY


def _is_open_start(start: Any) -> bool:
    return start is None or (isinstance(start, int) and start == 0)


def _is_open_end(end: Any) -> bool:
    return end is None or (isinstance(end, int) and end >= OPEN_END)


def _place(context: Context, value: Any, size: Any, default: int | None) -> torch.Tensor:
    """A slice bound counted from the front, clamped into [0, size], as a 0-d tensor; `default` None is the size."""
    limit = context.count_tensor(size)
    if value is None or (default is None and _is_open_end(value)):
        return limit if default is None else torch.zeros_like(limit)
    return torch.minimum(_from_front(context, value, limit).clamp(min=0), limit)


def _from_front(context: Context, value: Any, limit: torch.Tensor) -> torch.Tensor:
    place = context.count_tensor(value) if isinstance(value, Size) else torch.full_like(limit, value)
    return torch.where(place < 0, place + limit, place)


def _checked_place(context: Context, node: Node, index: Any, size: Any) -> torch.Tensor:
    """A single index counted from the front; out of range it is a user error."""
    limit = context.count_tensor(size)
    place = _from_front(context, index, limit)
    context.check((place >= limit) | (place < 0), Failure.USER_ERROR, f"index out of range in {node.target}", node)
    return place


@rule("select.int")
def select(context: Context, node: Node, source: Any, dim: int, index: Any) -> Any:
    data, size = context.raw(source), context.sizes_of(source)[dim]
    if isinstance(size, int) and isinstance(index, int):
        return node.target(data, dim, index), source.pad if isinstance(source, Bounded) else Pad.ANY  # type: ignore[operator]
    return rows_at(data, dim, _checked_place(context, node, index, size).view(1)).squeeze(dim)


@rule("select_scatter.default")
def select_scatter(context: Context, node: Node, target: Any, source: Any, dim: int, index: Any) -> torch.Tensor:
    data, sizes = context.raw(target), list(context.sizes_of(target))
    size = sizes.pop(dim)
    for own, wanted in zip(context.sizes_of(source), sizes, strict=True):
        context.check_same(node, own, wanted)
    values = context.fitted(source, sizes)
    if isinstance(size, int) and isinstance(index, int):
        return node.target(data, values, dim, index)  # type: ignore[operator]
    hit = torch.arange(data.shape[dim], device=data.device) == _checked_place(context, node, index, size)
    return torch.where(along(hit, dim, data.dim()), values.unsqueeze(dim), data)


@rule("slice_scatter.default")
def slice_scatter(
    context: Context,
    node: Node,
    target: Any,
    source: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> torch.Tensor:
    """Row j of the target takes row (j - start) / step of the source while j is in the slice."""
    data, sizes, rows = context.raw(target), list(context.sizes_of(target)), context.sizes_of(source)[dim]
    size = sizes[dim]
    if not isinstance(step, int):
        raise refuse(
            node, "an assignment to a slice with a device step", "assign through start + step * torch.arange(k)"
        )
    fixed = isinstance(size, int) and not isinstance(start, Size) and not isinstance(end, Size)
    sizes[dim] = len(range(*slice(start, end, step).indices(size))) if fixed else rows
    for own, wanted in zip(context.sizes_of(source), sizes, strict=True):
        context.check_same(node, own, wanted)
    values = context.fitted(source, sizes)
    if fixed:
        return node.target(data, values, dim, start, end, step)  # type: ignore[operator]
    first, last = _place(context, start, size, 0), _place(context, end, size, None)
    length = torch.div(last - first + (step - 1), step, rounding_mode="floor").clamp(min=0)
    if not (_is_open_start(start) and _is_open_end(end) and step == 1 and rows == size):
        context.check(length != context.count(rows), Failure.PRECONDITION, f"a slice of {rows} rows", node)
    row = torch.arange(data.shape[dim], device=data.device)
    inside = (row >= first) & (row < last) & ((row - first) % step == 0)
    moved = rows_at(values, dim, torch.div(row - first, step, rounding_mode="floor"))
    return torch.where(along(inside, dim, data.dim()), moved, data)


@rule("flip.default")
def flip(context: Context, node: Node, source: Any, dims: list[int]) -> torch.Tensor:
    """A dynamic dimension is read backwards from its true end."""
    del node
    data = context.raw(source)
    for d in dims:
        size = context.sizes_of(source)[d]
        if isinstance(size, int):
            data = data.flip(d)
        else:
            data = rows_at(data, d, context.count(size) - 1 - torch.arange(data.shape[d], device=data.device))
    return data


@rule("roll.default")
def roll(context: Context, node: Node, source: Bounded, shifts: Any, dims: Any = ()) -> torch.Tensor:
    """Row j comes from row j - shift, modulo the true size."""
    data = source.data
    if not dims:
        if source.dim() != 1:
            raise refuse(node, "a roll of a flattened tensor", "give it dims")
        dims = [0]
    for shift, d in zip(shifts, dims, strict=True):
        size = source.sizes[d]
        if isinstance(size, int) and not isinstance(shift, Size):
            data = data.roll(shift, d)
        else:
            rows = torch.arange(data.shape[d], device=data.device) - context.scalar(shift)
            data = rows_at(data, d, torch.remainder(rows, context.count_tensor(size).clamp(min=1)))
    return data
