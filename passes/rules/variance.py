"""var, std and their kin over a dynamic dimension: two passes over the valid elements with their true number."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.reductions import HALF, is_plain, reduced_dims
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded


def _moments(
    context: Context, source: Bounded, dim: Any, correction: Any, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean over `dim`, in float32 where the source is half."""
    dims = reduced_dims(source, dim)
    wide = Bounded(source.data.to(torch.float32) if source.dtype in HALF else source.data, source.sizes)
    correction = 1 if correction is None else context.scalar(correction)
    if is_plain(wide, dims):
        return torch.var_mean(wide.data, dims, correction=correction, keepdim=keepdim)
    n = context.elements(wide.sizes[d] for d in dims).to(wide.dtype)
    average = context.select(wide, 0, dims).sum(dims, keepdim=True) / n
    centred = context.select(Bounded(wide.data - average, wide.sizes), 0, dims)
    spread = (centred * centred).sum(dims, keepdim) / (n - correction).clamp(min=0)
    return spread, average if keepdim else average.squeeze(dims)


@rule("var.correction")
def var(
    context: Context, node: Node, source: Bounded, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> torch.Tensor:
    del node
    return _moments(context, source, dim, correction, keepdim)[0].to(source.dtype)


@rule("std.correction")
def std(
    context: Context, node: Node, source: Bounded, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> torch.Tensor:
    del node
    return _moments(context, source, dim, correction, keepdim)[0].sqrt().to(source.dtype)


@rule("var_mean.correction")
def var_mean(
    context: Context, node: Node, source: Bounded, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    del node
    return tuple(v.to(source.dtype) for v in _moments(context, source, dim, correction, keepdim))


@rule("std_mean.correction")
def std_mean(
    context: Context, node: Node, source: Bounded, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    del node
    spread, average = _moments(context, source, dim, correction, keepdim)
    return spread.sqrt().to(source.dtype), average.to(source.dtype)
