"""Writes along one dimension by index: sums add zeros for pads, everything else sends them to a dump row."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context, along
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded


@rule("index_add.default")
def index_add(
    context: Context, node: Node, target: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1
) -> torch.Tensor:
    """Pads, whose values are zero, are spread over the rows, so that no one row collects their atomics."""
    size = context.sizes_of(target)[dim]
    safe = context.index(node, index, node.args[2], size)
    if isinstance(index, Bounded) and index.dim() == 1:
        spread = torch.arange(safe.shape[0], device=safe.device) % max(context.cap(size), 1)
        safe = torch.where(context.valid(index.sizes[0]), safe, spread.to(safe.dtype))
    values, alpha = context.select(source, 0, [dim]), context.scalar(alpha)
    values = _matching(context, node, target, dim, index, source, values)
    return context.raw(target).index_add(
        dim, safe, values if isinstance(alpha, (int, float)) and alpha == 1 else (values * alpha).to(values.dtype)
    )


def _matching(context: Context, node: Node, target: Any, dim: int, index: Any, source: Any, data: Any) -> Any:
    """`data` of the source, whose size along `dim` has to be the index's, and the target's elsewhere."""
    own, wanted = context.sizes_of(source), list(context.sizes_of(target))
    if len(own) != len(wanted) or not own:
        return data
    wanted[dim] = next(iter(context.sizes_of(index)), 1)
    for a, b in zip(own, wanted, strict=True):
        context.check_same(node, a, b)
    return context.fitted(Bounded(data, own), wanted)


@rule("scatter_add.default")
def scatter_add(context: Context, node: Node, target: Any, dim: int, index: Any, source: Any) -> torch.Tensor:
    safe = context.index(node, index, node.args[2], context.sizes_of(target)[dim])
    values = _at_index(context.raw(source), safe)
    mask = context.all_valid(index)
    values = (
        values if mask is None else torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    )
    return context.raw(target).scatter_add(dim, safe, values)


def _at_index(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A source may be larger than the index: only what stands at an index is written."""
    for d in range(values.dim()):
        if values.shape[d] > index.shape[d]:
            values = values.narrow(d, 0, index.shape[d])
    return values


@rule("scatter_reduce.two", "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce")
def scatter(
    context: Context, node: Node, target: Any, dim: int, index: Any, source: Any, *mode: Any, **options: Any
) -> torch.Tensor:
    """An identity for pads would do for sums, not for the count of a mean: they go to the dump row."""
    data, safe = _dumped(context, node, target, dim, index)
    is_tensor = isinstance(source, (Bounded, torch.Tensor))
    values = _at_index(context.raw(source), safe) if is_tensor and context.raw(source).dim() else context.scalar(source)
    if isinstance(values, torch.Tensor) and not is_tensor:  # a number that lives on the device
        values = values.to(data.dtype).expand(safe.shape)
        return torch.ops.aten.scatter.src(data, dim, safe, values).narrow(dim, 0, data.shape[dim] - 1)
    return node.target(data, dim, safe, values, *mode, **options).narrow(dim, 0, data.shape[dim] - 1)  # type: ignore[operator]


def _dumped(
    context: Context, node: Node, target: Any, dim: int, index: Any, wraps: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target with a row behind it, and indices whose pads point there."""
    data = context.raw(target)
    safe = context.index(node, index, node.args[2], context.sizes_of(target)[dim], wraps)
    mask = context.all_valid(index)
    safe = safe if mask is None else torch.where(mask, safe, data.shape[dim])
    dump = data.new_zeros([1 if d == dim % data.dim() else s for d, s in enumerate(data.shape)])
    return torch.cat([data, dump], dim), safe


@rule("index_copy.default", "index_reduce.default")
def index_copy(
    context: Context, node: Node, target: Any, dim: int, index: Any, source: Any, *mode: Any, **options: Any
) -> torch.Tensor:
    data, safe = _dumped(context, node, target, dim, index)
    values = _matching(context, node, target, dim, index, source, context.raw(source))
    return node.target(data, dim, safe, values, *mode, **options).narrow(dim, 0, data.shape[dim] - 1)  # type: ignore[operator]


@rule("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(context: Context, node: Node, target: Any, dim: int, index: Any, value: Any) -> torch.Tensor:
    """Unlike the other ops of this file, it counts negative indices from the end."""
    data, safe = _dumped(context, node, target, dim, index, wraps=True)
    hit = torch.zeros(data.shape[dim], dtype=torch.bool, device=data.device).index_fill(0, safe, True)
    fill = context.scalar(context.raw(value) if isinstance(value, Bounded) else value)
    rows = data.shape[dim] - 1
    return torch.where(along(hit[:rows], dim, data.dim()), fill, context.raw(target)).to(data.dtype)


@rule("embedding_dense_backward.default")
def embedding_dense_backward(
    context: Context, node: Node, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool
) -> torch.Tensor:
    """Pad rows carry a zero gradient."""
    if by_frequency:
        raise refuse(node, "scale_grad_by_freq with a dynamic batch", "leave scale_grad_by_freq off")
    safe = context.index(node, index, node.args[1], rows)
    return node.target(context.select(grad, 0), safe, rows, padding, by_frequency)  # type: ignore[operator]
