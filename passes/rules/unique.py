"""unique in all its forms: sorted, with inverse and counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import IDS, Context, along
from zgcompile.passes.rules.sorting import last_ascending
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Pad
from zgcompile.ir.status import Failure

Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@rule("_unique2.default")
def unique(
    context: Context, node: Node, source: Any, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> Any:
    """Ids below a bound that the envelope knows need no sort; others are sorted with the pads last."""
    del is_sorted, inverse
    flat = _flattened(context, node, source)
    n, cap = context.count_tensor(flat.sizes[0]), context.cap(node.meta["val"][0].shape[0])
    bound = context.id_bounds.get(node.name)
    if bound is not None and flat.dtype in IDS:
        values, places, numbers, count, in_bound = torch.ops.zgcompile.unique(flat.data, n, bound, cap, counts)
        context.check(~in_bound, Failure.CAPACITY, f"ids below {bound}", node)
    else:
        # A stable sort keeps pads behind the valid keys that equal theirs.
        ordered, order = torch.sort(context.select(flat, last_ascending(flat.dtype)), stable=True)
        heads, (first, places, numbers), count = _groups(
            context, flat.sizes[0], ordered[1:] != ordered[:-1], order, cap
        )
        values = _placed(ordered, first, heads, cap)
    context.bind_output(node, count, node.meta["val"][0], 0)
    return _results(context, node, (values, places, numbers))


@rule("unique_dim.default")
def unique_dim(
    context: Context,
    node: Node,
    source: Any,
    dim: int,
    is_sorted: bool = True,
    inverse: bool = False,
    counts: bool = False,
) -> Any:
    """Distinct rows of a matrix in lexicographic order: a stable sort a column, the last column first."""
    del is_sorted, inverse, counts
    table = context.bounded(source)
    if table.dim() != 2 or 1 - dim % 2 in table.dynamic():
        raise refuse(
            node,
            "unique along a dimension of what is not a matrix with the other dimension static",
            "number the rows by one id each first",
        )
    rows, size = table.data.movedim(dim, 0), table.sizes[dim]
    cap = context.cap(node.meta["val"][0].shape[dim])
    order = torch.arange(rows.shape[0], device=rows.device)
    for column in reversed(rows.unbind(1)):
        order = order[column[order].sort(stable=True)[1]]
    order = order[(~context.valid(size))[order].sort(stable=True)[1]]
    ordered = rows[order]
    heads, (first, places, numbers), count = _groups(context, size, (ordered[1:] != ordered[:-1]).any(1), order, cap)
    context.bind_output(node, count, node.meta["val"][0], dim)
    return _results(context, node, (_placed(ordered, first, heads, cap).movedim(0, dim), places, numbers))


@rule("unique_consecutive.default")
def unique_consecutive(
    context: Context, node: Node, source: Any, inverse: bool = False, counts: bool = False, dim: Any = None
) -> Any:
    """Runs of equal values of a 1-D tensor, or of the flattened one."""
    del inverse, counts
    if dim is not None and context.bounded(source).dim() != 1:
        raise refuse(node, "unique_consecutive along a dimension", "number the rows by one id each first")
    flat = _flattened(context, node, source)
    order, cap = torch.arange(flat.data.shape[0], device=flat.data.device), context.cap(node.meta["val"][0].shape[0])
    heads, (first, places, numbers), count = _groups(
        context, flat.sizes[0], flat.data[1:] != flat.data[:-1], order, cap
    )
    context.bind_output(node, count, node.meta["val"][0], 0)
    return _results(context, node, (_placed(flat.data, first, heads, cap), places, numbers))


def _flattened(context: Context, node: Node, source: Any) -> Bounded:
    table = context.bounded(source)
    if any(d > 0 for d in table.dynamic()):
        raise refuse(node, "a dynamic dimension that is not the leading one", "transpose first, rows leading")
    inner = math.prod(table.data.shape[1:])
    size = context.size(table.sizes[0]) * inner if table.dim() else 1
    return Bounded(table.data.reshape(-1), (size,), table.pad)


def _groups(
    context: Context, size: Any, differs: torch.Tensor, order: torch.Tensor, cap: int
) -> tuple[torch.Tensor, Groups, torch.Tensor]:
    """From rows in order, valid ones first, and whether each differs from the one before: the heads of the groups; the
    group of each row, in order and in the caller's, and the sizes of the groups; the number of groups. What does not
    fit lands in a dump row."""
    valid = context.valid(size)
    heads = torch.cat([valid[:1], differs]) & valid
    rank = heads.cumsum(0) - 1
    inverse = torch.zeros_like(rank).scatter(0, order, torch.where(valid, rank.clamp(0, max(cap - 1, 0)), 0))
    fits = torch.where(valid & (rank < cap), rank, cap).clamp(min=0)
    numbers = rank.new_zeros(cap + 1).scatter_add(0, fits, valid.to(torch.int64))[:cap]
    return heads, (rank, inverse, numbers), heads.sum()


def _placed(ordered: torch.Tensor, rank: torch.Tensor, heads: torch.Tensor, cap: int) -> torch.Tensor:
    """The head of each group, at its rank."""
    at = along(torch.where(heads & (rank < cap), rank, cap), 0, ordered.dim()).expand(ordered.shape)
    return ordered.new_zeros((cap + 1, *ordered.shape[1:])).scatter(0, at, ordered)[:cap]


def _results(context: Context, node: Node, found: Groups) -> tuple[Any, ...]:
    """Each output at the shape of the trace: one that was not asked for is empty."""
    results = []
    for data, like in zip(found, node.meta["val"], strict=True):
        empty = not any(isinstance(s, torch.SymInt) for s in like.shape) and like.numel() == 0
        if not empty and data.dtype != like.dtype and (like.dtype == torch.bool or like.dtype.is_floating_point):
            raise refuse(
                node,
                f"this torch release takes positions to be {like.dtype}",
                "make the values integers first: x.long()",
            )
        shaped = data.new_zeros(tuple(like.shape)) if empty else data.reshape(context.caps_of(like.shape))
        results.append((shaped.to(like.dtype), Pad.ZERO))
    return tuple(results)
