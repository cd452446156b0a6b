"""Sorting along a dynamic dimension: pads sort last, and a stable sort keeps them behind equal valid values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded
from zgcompile.ir.status import Failure
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.reductions import lowest
from zgcompile.passes.rules.table import rule


def last_ascending(dtype: torch.dtype) -> Any:
    """ATen sorts NaN behind every number, infinity included."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


@rule("sort.default", "sort.stable", "argsort.default", "argsort.stable")
def sort(context: Context, node: Node, source: Bounded, *args: Any, **kwargs: Any) -> Any:
    names = [a.name for a in node.target._schema.arguments][1:]  # type: ignore[union-attr]
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    dim, descending = options.get("dim", -1), options.get("descending", False)
    fill = lowest(source.dtype) if descending else last_ascending(source.dtype)
    values, order = torch.sort(context.select(source, fill, [dim]), dim=dim, descending=descending, stable=True)
    return order if "argsort" in str(node.target) else (values, order)


@rule("topk.default")
def topk(context: Context, node: Node, source: Bounded, k: Any, dim: int = -1, is_largest: bool = True, is_sorted: bool = True) -> Any:
    """k static; fewer valid values than k are eager's error too."""
    size = source.sizes[dim % source.dim()]
    if not isinstance(size, int):
        context.check(context.count_tensor(size) < k, Failure.USER_ERROR, f"topk of fewer than {k} values", node)
    fill = lowest(source.dtype) if is_largest else last_ascending(source.dtype)
    return node.target(context.select(source, fill, [dim]), k, dim, is_largest, is_sorted)  # type: ignore[operator]


@rule("searchsorted.Tensor", "bucketize.Tensor", "searchsorted.Scalar", "bucketize.Scalar")
def searchsorted(context: Context, node: Node, first: Any, second: Any, **kwargs: Any) -> torch.Tensor:
    """A dynamic sequence ends in the largest value, and no answer is above its true length."""
    is_bucketize = "bucketize" in str(node.target)
    sequence = second if is_bucketize else first
    operands = [context.raw(first), context.raw(second)]
    if isinstance(sequence, Bounded):
        operands[1 if is_bucketize else 0] = context.select(sequence, last_ascending(sequence.dtype), [-1])
    kwargs = {k: context.raw(v) for k, v in kwargs.items()}
    result = node.target(*operands, **kwargs)  # type: ignore[operator]
    if isinstance(sequence, Bounded):
        result = torch.minimum(result, context.count_tensor(sequence.sizes[-1]).to(result.dtype))
    return result
