"""Sums, means and norms over a dynamic dimension: pads become the identity first."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Number, Size

HALF = (torch.float16, torch.bfloat16)


def reduced_dims(value: Bounded, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(value.dim()))
    return [d % value.dim() for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def is_plain(value: Bounded, dims: list[int]) -> bool:
    """No dynamic dimension is reduced: the op itself is right."""
    return all(isinstance(value.sizes[d], int) for d in dims)


def applied(context: Context, node: Node, data: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The node's own op on other data."""
    return node.target(data, *context.raw(args), **context.raw(kwargs))  # type: ignore[operator]


def _named(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of the node by its schema's name, behind the first."""
    names = [a.name for a in node.target._schema.arguments][1:]  # type: ignore[union-attr]
    return dict(zip(names, args, strict=False)).get(name, kwargs.get(name))


@rule(
    "sum.default",
    "sum.dim_IntList",
    "any.default",
    "any.dim",
    "any.dims",
    "count_nonzero.default",
    "count_nonzero.dim_IntList",
    "nansum.default",
)
def total(context: Context, node: Node, source: Bounded, *args: Any, **kwargs: Any) -> Any:
    """Zero and False add nothing."""
    dims = reduced_dims(source, _named(node, args, kwargs, "dim"))
    return applied(context, node, context.select(source, 0, dims), args, kwargs)


@rule("all.default", "all.dim", "all.dims", "prod.default", "prod.dim_int")
def product(context: Context, node: Node, source: Bounded, *args: Any, **kwargs: Any) -> Any:
    """One and True change nothing."""
    dims = reduced_dims(source, _named(node, args, kwargs, "dim"))
    return applied(context, node, context.select(source, 1, dims), args, kwargs)


@rule("mean.default", "mean.dim")
def mean(context: Context, node: Node, source: Bounded, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The sum over valid elements, divided by their true number (NaN for none, as in eager). Half types sum in float32,
    as ATen does."""
    dims = reduced_dims(source, _named(node, args, kwargs, "dim"))
    if is_plain(source, dims):
        return applied(context, node, source.data, args, kwargs)
    out = node.meta["val"].dtype
    data = context.select(source, 0, dims).to(torch.float32 if out in HALF else out)
    keepdim = bool(_named(node, args, kwargs, "keepdim"))
    return (data.sum(dims, keepdim) / context.elements(source.sizes[d] for d in dims).to(data.dtype)).to(out)


@rule("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def vector_norm(context: Context, node: Node, source: Bounded, order: Any = 2, *args: Any, **kwargs: Any) -> Any:
    """Zero changes no norm of a positive order, infinity none of a negative one (1 / inf is 0)."""
    if isinstance(order, (Size, Number)):
        raise refuse(node, "a norm of a device order", "give the order as a number")
    dims = reduced_dims(source, _named(node, (order, *args), kwargs, "dim"))
    power = 2.0 if order is None else float(order)
    if math.isinf(power) or power < 0:
        context.check_not_empty(node, [source.sizes[d] for d in dims])
    given = (order, *args) if len(node.args) > 1 else ()
    return applied(context, node, context.select(source, 0 if power >= 0 else math.inf, dims), given, kwargs)


@rule("logsumexp.default")
def logsumexp(context: Context, node: Node, source: Bounded, dim: Any, keepdim: bool = False) -> torch.Tensor:
    del node
    return torch.logsumexp(context.select(source, -math.inf, reduced_dims(source, dim)), dim, keepdim)
