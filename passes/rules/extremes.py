"""Largest and smallest elements: pads become the value that never wins. Eager refuses an empty reduction, so does the
status."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.reductions import reduced_dims
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded


def lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def largest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _losers(context: Context, node: Node, source: Bounded, dims: list[int]) -> torch.Tensor:
    """The data with pads that lose."""
    context.check_not_empty(node, [source.sizes[d] for d in dims])
    fill = lowest if "max" in str(node.target) else largest
    return context.select(source, fill(source.dtype), dims)


@rule("amax.default", "amin.default")
def extreme(context: Context, node: Node, source: Bounded, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
    return node.target(_losers(context, node, source, reduced_dims(source, dim)), dim, keepdim)  # type: ignore[operator]


@rule("max.default", "min.default")
def flat_extreme(context: Context, node: Node, source: Bounded) -> torch.Tensor:
    return node.target(_losers(context, node, source, reduced_dims(source, None)))  # type: ignore[operator]


@rule("max.dim", "min.dim")
def extreme_with_index(context: Context, node: Node, source: Bounded, dim: int, keepdim: bool = False) -> Any:
    """Ties keep the lowest index, so a pad never wins against an equal valid value in front of it."""
    return tuple(node.target(_losers(context, node, source, [dim % source.dim()]), dim, keepdim))  # type: ignore[operator]


@rule("argmax.default", "argmin.default")
def arg_extreme(context: Context, node: Node, source: Bounded, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """Ties as above. A flat index counts in true sizes."""
    found = node.target(_losers(context, node, source, reduced_dims(source, dim)), dim, keepdim)  # type: ignore[operator]
    if dim is not None or source.dynamic() in ([], [0]):
        return found
    place = torch.zeros_like(found)
    stride: torch.Tensor | int = 1
    for d in reversed(range(source.dim())):
        place = place + found % source.data.shape[d] * stride
        found, stride = found // source.data.shape[d], stride * context.count(source.sizes[d])
    return place


@rule("aminmax.default")
def aminmax(
    context: Context, node: Node, source: Bounded, *, dim: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = reduced_dims(source, dim)
    context.check_not_empty(node, [source.sizes[d] for d in dims])
    low, high = (context.select(source, fill(source.dtype), dims) for fill in (largest, lowest))
    return torch.amin(low, dims, keepdim), torch.amax(high, dims, keepdim)
