"""Sorting along a dynamic dimension: pads sort last, and a stable sort keeps them behind equal valid values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.extremes import largest, lowest
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Number, Size
from zgcompile.ir.status import Failure


def last_ascending(dtype: torch.dtype) -> Any:
    """ATen sorts NaN behind every number, infinity included."""
    return math.nan if dtype.is_floating_point else largest(dtype)


def _sorted(context: Context, source: Bounded, dim: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    fill = lowest(source.dtype) if descending else last_ascending(source.dtype)
    values, order = torch.sort(context.select(source, fill, [dim]), dim=dim, descending=descending, stable=True)
    return values, order


@rule("sort.default")
def sort(context: Context, node: Node, source: Bounded, dim: int = -1, descending: bool = False) -> Any:
    del node
    return _sorted(context, source, dim, descending)


@rule("sort.stable")
def stable_sort(
    context: Context, node: Node, source: Bounded, *, stable: Any = None, dim: int = -1, descending: bool = False
) -> Any:
    del node, stable
    return _sorted(context, source, dim, descending)


@rule("topk.default")
def topk(
    context: Context,
    node: Node,
    source: Bounded,
    k: Any,
    dim: int = -1,
    is_largest: bool = True,
    is_sorted: bool = True,
) -> Any:
    """k static; fewer valid values than k are eager's error too."""
    if isinstance(k, Size):
        raise refuse(node, "a device k", "sort, then slice the first k")
    size, fill = source.sizes[dim], lowest(source.dtype) if is_largest else last_ascending(source.dtype)
    if not isinstance(size, int):
        context.check(context.count_tensor(size) < k, Failure.USER_ERROR, f"topk of fewer than {k} values", node)
    if context.device.type == "cpu" and not isinstance(size, int) and source.data.shape[dim] >= k:
        # On a GPU ATen's radix select takes equal values in the order of their places, so pads, behind, lose a tie with
        # the fill; the partial sort of a CPU takes any.
        values, order = _sorted(context, source, dim, is_largest)
        return values.narrow(dim, 0, k), order.narrow(dim, 0, k)
    data = context.select(source, fill, [dim])
    if data.shape[dim] < k:
        short = list(data.shape)
        short[dim] = k - data.shape[dim]
        data = torch.cat([data, data.new_full(short, fill)], dim)
    return tuple(node.target(data, k, dim, is_largest, is_sorted))  # type: ignore[operator]


@rule("searchsorted.Tensor")
def searchsorted(
    context: Context, node: Node, sequence: Any, values: Any, *, sorter: Any = None, **options: Any
) -> torch.Tensor:
    """A dynamic sequence ends in the largest value (NaN would send a binary search past it), and no answer is above its
    true length."""
    if sorter is not None:
        places = context.index(node, sorter, node.kwargs["sorter"], context.sizes_of(sequence)[-1])
        data = context.raw(sequence).gather(-1, places)
        sequence = Bounded(data, sequence.sizes) if isinstance(sequence, Bounded) else data
    return _search(
        context,
        node,
        sequence,
        context.raw(values),
        options,
        lambda s, v, o: torch.ops.aten.searchsorted.Tensor(s, v, **o),
    )


@rule("searchsorted.Scalar")
def searchsorted_scalar(
    context: Context, node: Node, sequence: Any, value: Any, *, sorter: Any = None, **options: Any
) -> torch.Tensor:
    wanted = _as_tensor(context, value, context.raw(sequence))
    return searchsorted(context, node, sequence, wanted, sorter=sorter, **options)


@rule("bucketize.Tensor")
def bucketize(context: Context, node: Node, values: Any, boundaries: Any, **options: Any) -> torch.Tensor:
    return _search(
        context,
        node,
        boundaries,
        context.raw(values),
        options,
        lambda s, v, o: torch.ops.aten.bucketize.Tensor(v, s, **o),
    )


def _as_tensor(context: Context, value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, (Size, Number)):
        data = context.scalar(value)
        return data if isinstance(data, torch.Tensor) else torch.full((), data, device=like.device)
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _search(
    context: Context, node: Node, sequence: Any, values: torch.Tensor, options: dict[str, Any], op: Any
) -> torch.Tensor:
    del node
    if not isinstance(sequence, Bounded) or isinstance(sequence.sizes[-1], int):
        return op(context.raw(sequence), values, options)
    found = op(context.select(sequence, largest(sequence.dtype), [-1]), values, options)
    return torch.minimum(found, context.count_tensor(sequence.sizes[-1]).to(found.dtype))


@rule("isin.Tensor_Tensor")
def isin(
    context: Context, node: Node, elements: Any, tests: Any, *, assume_unique: bool = False, invert: bool = False
) -> torch.Tensor:
    """A search in the sorted tests, pads last; what lies behind their true number is not found."""
    del node, assume_unique
    data, wanted = context.bounded(tests), context.raw(elements)
    dtype = torch.promote_types(data.dtype, wanted.dtype)
    flat = context.select(data, largest(data.dtype)).to(dtype).reshape(-1)
    valid = context.all_valid(data)
    marks = torch.ones_like(flat, dtype=torch.bool) if valid is None else valid.expand(data.data.shape).reshape(-1)
    # Two stable sorts: by value, and before that by validity, so that a valid value stands in front of its equals.
    front = (~marks).sort(stable=True)[1]
    ordered, order = flat[front].sort(stable=True)
    place = torch.searchsorted(ordered, wanted.to(dtype).contiguous()).clamp(max=max(flat.shape[0] - 1, 0))
    hit = (ordered[place] == wanted) & marks[front][order][place]
    return ~hit if invert else hit
