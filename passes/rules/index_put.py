"""Assignment and accumulation through index tensors and masks: pads go nowhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context, rows_at
from zgcompile.passes.rules.indexing import MASKS
from zgcompile.passes.rules.masks import is_count_of, true_rank
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded
from zgcompile.ir.status import Failure


@rule("index_put.default")
def index_put(
    context: Context, node: Node, target: Any, indices: list[Any], values: Any, accumulate: bool = False
) -> torch.Tensor:
    """The indexed dimensions to the front and into one, so that one flat row index remains."""
    used = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype in MASKS for d in used):
        return _masked_put(context, node, target, indices, values, accumulate)
    data, sizes = context.raw(target), context.sizes_of(target)
    safe = [context.index(node, indices[d], node.args[1][d], sizes[d], wraps=True) for d in used]  # type: ignore[index]
    masks = [m for m in (context.all_valid(indices[d]) for d in used) if m is not None]
    if not masks:
        given = dict(zip(used, safe, strict=True))
        return node.target(data, [given.get(d) for d in range(len(indices))], context.raw(values), accumulate)  # type: ignore[operator]
    rest = [d for d in range(data.dim()) if d not in used]
    front = data.permute(used + rest)
    flat = front.reshape(-1, *[data.shape[d] for d in rest])
    place = torch.zeros((), dtype=torch.int64, device=data.device)
    for d, index in zip(used, safe, strict=True):
        place = place * data.shape[d] + index
    rows = _rows(context.raw(values), place.shape, data.shape, used, rest).reshape(-1, *flat.shape[1:])
    written = _write(context, flat, place, rows, [indices[d] for d in used], masks, accumulate)
    return written.reshape(front.shape).permute([(used + rest).index(d) for d in range(data.dim())])


def _rows(
    values: torch.Tensor, index_shape: Sequence[int], shape: Sequence[int], used: list[int], rest: list[int]
) -> torch.Tensor:
    """Values broadcast to [index shape, rest]: adjacent indices put theirs where they stand, others in front."""
    lead = [d for d in rest if d < used[0]] if used == list(range(used[0], used[-1] + 1)) else []
    tail = rest[len(lead) :]
    wide = values.expand([*[shape[d] for d in lead], *index_shape, *[shape[d] for d in tail]])
    return wide.movedim(list(range(len(lead))), [len(index_shape) + k for k in range(len(lead))])


def _write(
    context: Context,
    flat: torch.Tensor,
    place: torch.Tensor,
    rows: torch.Tensor,
    indices: list[Any],
    masks: list[torch.Tensor],
    accumulate: bool,
) -> torch.Tensor:
    valid = masks[0]
    for mask in masks[1:]:
        valid = valid & mask
    valid = valid.expand(place.shape).reshape(-1)
    if accumulate:
        zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
        rows = torch.where(valid.reshape(-1, *[1] * (rows.dim() - 1)), rows, zero)
        return torch.ops.aten.index_put.default(flat, [place.reshape(-1)], rows, True)
    only = indices[0]
    if len(indices) == 1 and only.dim() == 1:
        return torch.ops.zgcompile.index_put(flat, place, rows, context.count_tensor(only.sizes[0]))
    # The op skips what lies outside [0, rows).
    return torch.ops.zgcompile.index_put(
        flat, torch.where(valid, place.reshape(-1), -1), rows, context.count_tensor(valid.shape[0])
    )


def _masked_put(
    context: Context, node: Node, target: Any, indices: list[Any], values: Any, accumulate: bool
) -> torch.Tensor:
    """`target[mask] = values`: each True element takes the value of its rank, so no scatter is needed."""
    used = [d for d, i in enumerate(indices) if i is not None]
    if len(used) != 1:
        raise refuse(node, "a boolean mask together with other indices", "use torch.where")
    at, mask = used[0], indices[used[0]]
    flags = context.select(mask, False).to(torch.bool)
    data = context.raw(target).movedim(list(range(at, at + flags.dim())), list(range(flags.dim())))
    behind = data.dim() - flags.dim()
    rows, after = context.raw(values), behind - at
    if rows.dim() > after:
        column = rows.dim() - 1 - after
        _check_number(context, node, mask, flags, context.sizes_of(values)[column])
        rows = rows.movedim(column, 0)
        rows = rows.reshape(rows.shape[0], *[1] * (behind - rows.dim() + 1), *rows.shape[1:])
        if rows.shape[0] != 1:
            rows = (
                rows_at(rows, 0, true_rank(flags).reshape(-1)).reshape(*flags.shape, *rows.shape[1:])
                if rows.shape[0]
                else data
            )
    wide = flags.reshape(*flags.shape, *[1] * behind)
    written = torch.where(wide, (data + rows if accumulate else rows).to(data.dtype), data)
    return written.movedim(list(range(flags.dim())), list(range(at, at + flags.dim())))


def _check_number(context: Context, node: Node, mask: Any, flags: torch.Tensor, size: Any) -> None:
    """Eager refuses another number of values than of True elements, but for a single one that broadcasts."""
    if size != 1 and not is_count_of(context, mask, size):
        count = context.count(size)
        wrong = (flags.sum() != count) if isinstance(count, int) else (flags.sum() != count) & (count != 1)
        context.check(wrong, Failure.USER_ERROR, "shape mismatch in a masked assignment", node)


@rule("masked_scatter.default")
def masked_scatter(context: Context, node: Node, target: Any, mask: Any, source: Any) -> torch.Tensor:
    """The k-th True element takes the k-th element of the source."""
    data, values = context.raw(target), context.bounded(source)
    if any(d > 0 for d in values.dynamic()):
        raise refuse(node, "values whose dynamic dimension is not the leading one", "transpose them first")
    masked = (
        mask
        if isinstance(mask, Bounded) or not isinstance(target, Bounded)
        else Bounded(mask.expand(data.shape), target.sizes)
    )
    flags = context.select(masked, False).expand(data.shape)
    flags = context.select(Bounded(flags, target.sizes), False) if isinstance(target, Bounded) else flags
    context.check(
        flags.sum() > context.elements(values.sizes), Failure.USER_ERROR, "too few values in masked_scatter", node
    )
    taken = rows_at(values.data.reshape(-1), 0, true_rank(flags).reshape(-1)).reshape(data.shape)
    return torch.where(flags, taken, data)


@rule("masked_scatter_backward.default")
def masked_scatter_backward(context: Context, node: Node, grad: Any, mask: Any, sizes: Any) -> torch.Tensor:
    """The gradients of the True elements, in order, then zeros."""
    del node
    caps = context.caps_of(sizes)
    flags = context.select(mask, False).expand(context.raw(grad).shape)
    flags = context.select(Bounded(flags, grad.sizes), False) if isinstance(grad, Bounded) else flags
    total = math.prod(caps)
    place = torch.where(flags, true_rank(flags), total).reshape(-1).clamp(max=total)
    out = context.raw(grad).new_zeros(total + 1).scatter(0, place, context.raw(grad).reshape(-1))
    return out[:total].reshape(caps)


@rule("put.default")
def put(context: Context, node: Node, target: Any, index: Any, source: Any, accumulate: bool = False) -> torch.Tensor:
    """`target.flatten()[index] = source`."""
    if isinstance(target, Bounded):
        raise refuse(node, "put into a dynamic tensor", "assign through an index: x[i] = v")
    safe = context.index(node, index, node.args[1], target.numel(), wraps=True).reshape(-1)
    valid = context.all_valid(index)
    valid = (
        torch.ones_like(safe, dtype=torch.bool) if valid is None else valid.expand(context.raw(index).shape).reshape(-1)
    )
    rows = context.raw(source).reshape(-1)
    return _write(context, target.reshape(-1), safe, rows, [index, index], [valid], accumulate).reshape(target.shape)
