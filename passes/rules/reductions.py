"""Reductions and scans over a dynamic dimension: pads become the identity first."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded
from zgcompile.ir.status import Failure
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.shaping import refuse
from zgcompile.passes.rules.table import rule


def lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def largest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def reduced_dims(value: Bounded, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(value.dim()))
    return [d % value.dim() for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _fill_then(fill: Any) -> Any:
    def reduction(context: Context, node: Node, source: Bounded, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        data = context.select(source, fill(source.dtype) if callable(fill) else fill, reduced_dims(source, dim))
        has_dim = len(node.args) > 1 or "dim" in node.kwargs
        positional = [dim, *args] if has_dim else list(args)
        return node.target(data, *context.raw(positional), **{k: v for k, v in kwargs.items() if k != "dim"})  # type: ignore[operator]

    return reduction


rule("sum.default", "sum.dim_IntList", "any.default", "any.dim", "any.dims", "count_nonzero.default", "count_nonzero.dim_IntList", "nansum.default")(_fill_then(0))
rule("all.default", "all.dim", "all.dims", "prod.default", "prod.dim_int")(_fill_then(1))


@rule("linalg_vector_norm.default", "norm.Scalar", "norm.ScalarOpt_dim")
def vector_norm(context: Context, node: Node, source: Bounded, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Zero changes no norm of positive order."""
    if order is not None and float(order) <= 0:
        raise refuse(node, f"a norm of order {order} over a dynamic dimension", "use a positive order")
    data = context.select(source, 0, reduced_dims(source, dim))
    return node.target(data, *[order, dim, *args][: max(len(node.args) - 1, 0)], **kwargs)  # type: ignore[operator]


def element_count(context: Context, source: Bounded, dims: list[int]) -> torch.Tensor:
    count = torch.ones((), dtype=torch.int64, device=source.data.device)
    for d in dims:
        count = count * context.count(source.sizes[d])
    return count


@rule("mean.default", "mean.dim")
def mean(context: Context, node: Node, source: Bounded, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    """The sum over valid elements, divided by their true number (NaN for none, as in eager)."""
    dims = reduced_dims(source, dim)
    data = context.select(source, 0, dims)
    data = data if dtype is None else data.to(dtype)
    return data.sum(dims, keepdim) / element_count(context, source, dims).to(data.dtype)


@rule("amax.default", "amin.default", "max.default", "min.default")
def extreme(context: Context, node: Node, source: Bounded, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
    """Eager refuses an empty reduction, so does the status."""
    dims = reduced_dims(source, dim)
    fill = lowest if "max" in str(node.target) else largest
    context.check(element_count(context, source, dims) == 0, Failure.USER_ERROR, f"{node.target} of no elements", node)
    data = context.select(source, fill(source.dtype), dims)
    return node.target(data, list(dims), keepdim) if "am" in str(node.target) else node.target(data)  # type: ignore[operator]


@rule("max.dim", "min.dim")
def extreme_with_index(context: Context, node: Node, source: Bounded, dim: int, keepdim: bool = False) -> Any:
    fill = lowest if "max" in str(node.target) else largest
    _check_not_empty(context, node, source, dim)
    values, index = node.target(context.select(source, fill(source.dtype), [dim]), dim, keepdim)  # type: ignore[operator]
    return values, index


@rule("argmax.default", "argmin.default")
def arg_extreme(context: Context, node: Node, source: Bounded, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """Ties keep the lowest index, so a pad never wins against an equal valid value in front of it."""
    fill = lowest if "argmax" in str(node.target) else largest
    if dim is None and source.dynamic() != [0]:
        raise refuse(node, "a flat argmax with a dynamic inner dimension", "give it a dim")
    if dim is None or dim % source.dim() in source.dynamic():
        _check_not_empty(context, node, source, dim or 0)
    return node.target(context.select(source, fill(source.dtype), None if dim is None else [dim]), dim, keepdim)  # type: ignore[operator]


def _check_not_empty(context: Context, node: Node, source: Bounded, dim: int) -> None:
    size = source.sizes[dim % source.dim()]
    if not isinstance(size, int):
        context.check(context.count_tensor(size) == 0, Failure.USER_ERROR, f"{node.target} over an empty dimension", node)


@rule("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def variance(context: Context, node: Node, source: Bounded, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    """Two passes over the valid elements with their true number."""
    dims = reduced_dims(source, dim)
    correction = 1 if correction is None else correction
    n = element_count(context, source, dims).to(source.dtype)
    average = context.select(source, 0, dims).sum(dims, keepdim=True) / n
    centred = context.select(Bounded(source.data - average, source.sizes), 0, dims)
    spread = (centred * centred).sum(dims, keepdim) / (n - correction).clamp(min=0)
    name = str(node.target)
    result = spread.sqrt() if "std" in name else spread
    return (result, average if keepdim else average.squeeze(dims)) if "_mean" in name else result


@rule("cumsum.default", "cumprod.default", "cummax.default", "cummin.default", "logcumsumexp.default")
def scan(context: Context, node: Node, source: Bounded, dim: int, **kwargs: Any) -> Any:
    """Only what lies in front of an element counts: pads stay pads."""
    return node.target(context.raw(source), dim, **kwargs)  # type: ignore[operator]


@rule("logsumexp.default")
def logsumexp(context: Context, node: Node, source: Bounded, dim: Any, keepdim: bool = False) -> torch.Tensor:
    return torch.logsumexp(context.select(source, -math.inf, reduced_dims(source, dim)), dim, keepdim)
