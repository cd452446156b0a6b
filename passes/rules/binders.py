"""Ops that make a size: the only ones that write a count."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from zgcompile.errors import InternalError
from zgcompile.ir.bounded import Bounded, Number, Pad, Size
from zgcompile.ir.status import Failure
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.shaping import refuse
from zgcompile.passes.rules.table import rule


@rule("zgcompile::dynamic_rows")
def dynamic_rows(context: Context, node: Node, buffer: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """An argument: the static buffer itself, its count given by the caller."""
    context.bind(node, length)
    return buffer


@rule("zgcompile::dynamic_rows_like")
def dynamic_rows_like(context: Context, node: Node, buffer: torch.Tensor, rows: Bounded) -> torch.Tensor:
    """An argument that shares its count with `rows`."""
    del context, node, rows
    return buffer


@rule("_local_scalar_dense.default")
def item(context: Context, node: Node, source: torch.Tensor) -> Any:
    """`.item()`: the value stays on the device, as a count where it is a size."""
    value = node.meta["val"]
    if isinstance(source, Bounded):
        source = source.data
    source = source.reshape(())
    if isinstance(value, torch.SymFloat):
        return Number(source.to(torch.float64))
    if not isinstance(value, torch.SymInt):
        raise InternalError(f"{node}: an item of type {type(value).__name__}")
    symbol = value.node.expr
    if symbol not in context.counts:
        context.bind_symbol(symbol, source.to(torch.int64), node)
    return Size(symbol)


@rule("nonzero.default")
def nonzero(context: Context, node: Node, source: Any) -> Any:
    """Positions of nonzero elements: one compaction, then the index of each dimension."""
    flags = Bounded(source.data != 0, source.sizes) if isinstance(source, Bounded) else source != 0
    if isinstance(source, Bounded) and source.dtype == torch.bool:
        flags = source
    elif not isinstance(source, Bounded) and source.dtype == torch.bool:
        flags = source
    positions = context.compact(node, flags)
    columns = []
    for size in reversed(context.raw(source).shape):
        columns.append(positions % size)
        positions = positions // size
    return torch.stack(columns[::-1], 1), Pad.ZERO


@rule("masked_select.default")
def masked_select(context: Context, node: Node, source: Any, mask: Any) -> Any:
    """`source[mask]` flat, source and mask broadcast."""
    if isinstance(source, Bounded) and isinstance(mask, Bounded) and source.sizes != mask.sizes:
        raise refuse(node, "mask and source have different dynamic sizes", "index with the mask: x[mask]")
    data, flags = torch.broadcast_tensors(context.raw(source), context.select(mask, False))
    sizes = mask.sizes if isinstance(mask, Bounded) else source.sizes if isinstance(source, Bounded) else tuple(data.shape)
    flags_like = Bounded(flags, sizes) if any(not isinstance(s, int) for s in sizes) else flags
    return data.reshape(-1).index_select(0, context.compact(node, flags_like))


@rule("_unique2.default", "unique_dim.default")
def unique(context: Context, node: Node, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Sorted unique. Ids below a bound that the envelope knows need no sort; others are sorted with the pads last."""
    flat = _one_dimensional(context, node, source)
    n = context.count_tensor(flat.sizes[0])
    symbol = next(iter(node.meta.get("unbacked_bindings") or {}), None)
    if symbol is None:
        raise InternalError(f"{node}: unique without a size symbol")
    cap, bound = context.cap(symbol), context.id_bounds.get(node.name)
    wants_counts = bool(args[2] if len(args) > 2 else kwargs.get("return_counts", False))
    if bound is not None and flat.dtype in (torch.int32, torch.int64):
        values, inverse, counts, count, in_bound = torch.ops.zgcompile.unique(flat.data, n, bound, cap, wants_counts)
        context.check(~in_bound, Failure.CAPACITY, f"ids below {bound}", node)
    else:
        values, inverse, counts, count = _unique_by_sort(context, flat, n, cap)
    context.bind_symbol(symbol, count, node)
    outputs = node.meta["val"]
    results = []
    for data, like in zip((values, inverse, counts), outputs, strict=True):
        empty = not any(isinstance(s, torch.SymInt) for s in like.shape) and like.numel() == 0
        results.append((data.new_zeros(tuple(like.shape)) if empty else data.to(like.dtype).reshape(context.caps_of(like.shape)), Pad.ANY if empty else Pad.ZERO))
    return tuple(results)


def _one_dimensional(context: Context, node: Node, source: Any) -> Bounded:
    if not isinstance(source, Bounded):
        return Bounded(source.reshape(-1), (source.numel(),))
    if source.dynamic() != [0]:
        raise refuse(node, "unique of a tensor whose leading dimension is not the dynamic one", "flatten it first, rows leading")
    if source.dim() == 1:
        return source
    inner = 1
    for size in source.data.shape[1:]:
        inner *= int(size)
    return Bounded(source.data.reshape(-1), (context.size(source.sizes[0]) * inner,), source.pad)


def _unique_by_sort(context: Context, flat: Bounded, n: torch.Tensor, cap: int) -> tuple[torch.Tensor, ...]:
    """Any dtype: pads carry the largest key and a stable sort keeps them behind equal valid keys."""
    length = flat.data.shape[0]
    key = context.select(flat, _largest(flat.dtype), [0])
    ordered, order = torch.sort(key, stable=True)
    valid = torch.arange(length, device=key.device) < n
    head = torch.cat([valid[:1], ordered[1:] != ordered[:-1]]) & valid
    rank = head.cumsum(0) - 1
    values = ordered.new_zeros(cap + 1).scatter(0, torch.where(head & (rank < cap), rank, cap), ordered)[:cap]
    safe = rank.clamp(min=0, max=max(cap - 1, 0))
    inverse = torch.zeros_like(rank).scatter(0, order, torch.where(valid, safe, 0))
    ones = valid.to(torch.int64)
    counts = rank.new_zeros(cap + 1).scatter_add(0, torch.where(valid & (rank < cap), rank.clamp(min=0), cap), ones)[:cap]
    return values, inverse, counts, head.sum()


def _largest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


@rule("unique_consecutive.default")
def unique_consecutive(context: Context, node: Node, source: Any, return_inverse: bool = False, return_counts: bool = False, dim: Any = None) -> Any:
    """Runs of equal values of a 1-D tensor."""
    del return_inverse, return_counts, dim
    flat = _one_dimensional(context, node, source)
    symbol = next(iter(node.meta["unbacked_bindings"]))
    cap = context.cap(symbol)
    valid = context.valid(flat.sizes[0])
    head = torch.cat([valid[:1], flat.data[1:] != flat.data[:-1]]) & valid
    rank = head.cumsum(0) - 1
    context.bind_symbol(symbol, head.sum(), node)
    values = flat.data.new_zeros(cap + 1).scatter(0, torch.where(head & (rank < cap), rank, cap), flat.data)[:cap]
    counts = rank.new_zeros(cap + 1).scatter_add(0, torch.where(valid & (rank < cap), rank.clamp(min=0), cap), valid.to(torch.int64))[:cap]
    results = []
    for data, like in zip((values, rank.clamp(min=0, max=max(cap - 1, 0)), counts), node.meta["val"], strict=True):
        empty = not any(isinstance(s, torch.SymInt) for s in like.shape) and like.numel() == 0
        results.append(data.new_zeros(tuple(like.shape)) if empty else data.reshape(context.caps_of(like.shape)))
    return tuple(results)


@rule("repeat_interleave.Tensor")
def repeat_interleave(context: Context, node: Node, repeats: Any, output_size: Any = None) -> Any:
    """Index of the row that each output row repeats; the total is the new size."""
    del output_size
    out = node.meta["val"].shape[0]
    cap = context.cap(out)
    n = context.count_tensor(context.sizes_of(repeats)[0])
    index, total = torch.ops.zgcompile.repeat_interleave(context.raw(repeats), n, cap)
    context.check(total < 0, Failure.USER_ERROR, "repeats can not be negative", node)
    size = context.size(out)
    if isinstance(size, sympy.Symbol) and size not in context.counts:
        context.bind_symbol(size, total, node)
    else:
        context.check(total != context.count(out), Failure.PRECONDITION, "output_size of repeat_interleave", node)
    return index.to(node.meta["val"].dtype), Pad.ZERO


@rule("bincount.default")
def bincount(context: Context, node: Node, source: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Occurrences of each value; the size is max(largest + 1, minlength)."""
    values = source if isinstance(source, Bounded) else Bounded(source, tuple(source.shape))
    out = context.size(node.meta["val"].shape[0])
    cap = context.cap(out)
    valid = context.valid(values.sizes[0])
    context.check((valid & (values.data < 0)).any(), Failure.USER_ERROR, "bincount of a negative value", node)
    largest = torch.where(valid, values.data, -1).amax() + 1 if values.data.shape[0] else values.data.new_zeros(())
    context.bind(node, largest.to(torch.int64).clamp(min=context.raw(minlength)))
    place = torch.where(valid & (values.data >= 0) & (values.data < cap), values.data, cap).to(torch.int64)
    weight = valid.to(torch.int64) if weights is None else context.select(weights, 0)
    zeros = torch.zeros(cap + 1, dtype=node.meta["val"].dtype, device=weight.device)
    return zeros.scatter_add(0, place, weight.to(zeros.dtype))[:cap], Pad.ZERO
