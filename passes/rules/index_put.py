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
    shape = _index_sizes(context, node, [context.sizes_of(indices[d]) for d in used])
    safe = [_index(context, node, indices[d], node.args[1][d], sizes[d], shape) for d in used]  # type: ignore[index]
    rest = [d for d in range(data.dim()) if d not in used]
    lead = [d for d in rest if d < used[0]] if used == list(range(used[0], used[-1] + 1)) else []
    tail = rest[len(lead) :]
    rows = context.aligned(node, values, [*[sizes[d] for d in lead], *shape, *[sizes[d] for d in tail]])
    if all(isinstance(s, int) for s in shape):
        given = dict(zip(used, safe, strict=True))
        return node.target(data, [given.get(d) for d in range(len(indices))], rows, accumulate)  # type: ignore[operator]
    front = data.permute(used + rest)
    flat = front.reshape(-1, *[data.shape[d] for d in rest])
    place = torch.zeros((), dtype=torch.int64, device=data.device)
    for d, index in zip(used, safe, strict=True):
        place = place * data.shape[d] + index
    caps = context.caps_of(shape)
    place = place if list(place.shape) == caps else place.expand(caps)
    # Adjacent indices put their dimensions where they stand, others in front.
    wide = rows.expand([*[data.shape[d] for d in lead], *caps, *[data.shape[d] for d in tail]])
    wide = wide.movedim(list(range(len(lead))), [len(caps) + k for k in range(len(lead))])
    rows = wide.reshape(-1, *flat.shape[1:])
    written = _write(context, flat, place, rows, shape, accumulate)
    return written.reshape(front.shape).permute([(used + rest).index(d) for d in range(data.dim())])


def _index(context: Context, node: Node, index: Any, index_node: Any, size: Any, shape: list[Any]) -> torch.Tensor:
    safe = context.index(node, index, index_node, size, wraps=True)
    return context.fitted(Bounded(safe, context.sizes_of(index)), shape)


def _index_sizes(context: Context, node: Node, sizes: list[tuple[Any, ...]]) -> list[Any]:
    """What index tensors of these sizes broadcast to."""
    shape: list[Any] = [1] * max(len(s) for s in sizes)
    for own in sizes:
        for back, size in enumerate(reversed(own), 1):
            if shape[-back] == 1:
                shape[-back] = size
            elif size != 1:
                context.check_same(node, size, shape[-back])
    return shape


def _write(
    context: Context,
    flat: torch.Tensor,
    place: torch.Tensor,
    rows: torch.Tensor,
    sizes: Sequence[Any],
    accumulate: bool,
) -> torch.Tensor:
    """`flat[place] = rows` for the places that are valid in `sizes`, those of the index."""
    if len(sizes) == 1 and not accumulate:
        return torch.ops.zgcompile.index_put(flat, place, rows, context.count_tensor(sizes[0]))
    mask = context.all_valid(Bounded(place, tuple(sizes)))
    valid = (torch.ones_like(place, dtype=torch.bool) if mask is None else mask.expand(place.shape)).reshape(-1)
    if accumulate:
        zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
        rows = torch.where(valid.reshape(-1, *[1] * (rows.dim() - 1)), rows, zero)
        return torch.ops.aten.index_put.default(flat, [place.reshape(-1)], rows, True)
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
    at, mask, sizes = used[0], indices[used[0]], context.sizes_of(target)
    masked, own = sizes[at : at + mask.dim()], context.sizes_of(values)
    chosen = Bounded(context.select(mask, False).to(torch.bool), context.sizes_of(mask))
    flags = context.aligned(node, chosen, masked)
    data = context.raw(target).movedim(list(range(at, at + flags.dim())), list(range(flags.dim())))
    behind = data.dim() - flags.dim()
    after = behind - at
    column = len(own) - 1 - after
    number = [own[column]] if column >= 0 else []
    rows = context.aligned(node, values, [*sizes[:at], *number, *sizes[at + flags.dim() :]])
    if number:
        _check_number(context, node, mask, flags, number[0])
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
    """Eager refuses another number of values than of True elements, but for a single one that broadcasts. A dynamic
    number that is one is not the traced step."""
    if size != 1 and not is_count_of(context, mask, size):
        failure = Failure.USER_ERROR if isinstance(size, int) else Failure.PRECONDITION
        context.check(flags.sum() != context.count(size), failure, "shape mismatch in a masked assignment", node)


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
    safe, shape = context.index(node, index, node.args[1], target.numel(), wraps=True), context.sizes_of(index)
    if len(context.sizes_of(source)) == len(shape):
        for a, b in zip(context.sizes_of(source), shape, strict=True):
            context.check_same(node, a, b)
        rows = context.fitted(source, shape)
    elif isinstance(source, Bounded) or isinstance(index, Bounded):
        raise refuse(node, "put of a source whose shape is not that of its index", "reshape the source")
    else:
        rows = source
    return _write(context, target.reshape(-1), safe, rows.reshape(-1), shape, accumulate).reshape(target.shape)
