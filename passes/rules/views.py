"""Reshapes: free where pads stay behind the valid elements, else one gather over logical positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context, along
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded

Sizes = Sequence[int | sympy.Expr]


@rule("view.default", "_unsafe_view.default")
def view(context: Context, node: Node, source: Any, shape: Any) -> Any:
    del shape
    sizes = tuple(context.size(s) for s in node.meta["val"].shape)
    caps = context.caps_of(sizes)
    if not isinstance(source, Bounded):
        return source.reshape(caps)
    if _keeps_places(source.sizes, sizes):
        return source.data.reshape(caps), source.pad
    return source.data.reshape(-1)[_moved(context, sizes, caps, source)]


def _keeps_places(before: Sizes, after: Sizes) -> bool:
    """Only dimensions of size one come or go, or the one dynamic dimension is merged or split behind the same static
    prefix."""
    if [s for s in before if s != 1] == [s for s in after if s != 1]:
        return True
    a, b = _prefix(before), _prefix(after)
    return a == b and sum(not isinstance(s, int) for s in before) == sum(not isinstance(s, int) for s in after) == 1


def _prefix(sizes: Sizes) -> int:
    """The product of the static sizes in front of the first dynamic one."""
    first = next(d for d, s in enumerate(sizes) if not isinstance(s, int))
    return math.prod(sizes[:first])


def _moved(context: Context, sizes: Sizes, caps: list[int], source: Bounded) -> torch.Tensor:
    """Where in the source's memory each element of the result lies: its logical position, counted in true sizes,
    decides."""
    logical = torch.zeros((), dtype=torch.int64, device=source.data.device)
    for d, size in enumerate(sizes):
        logical = logical * context.count(size) + along(torch.arange(caps[d], device=logical.device), d, len(sizes))
    return (
        linear(context, logical, source.sizes, source.data.shape).clamp(0, max(source.data.numel() - 1, 0)).expand(caps)
    )


def linear(context: Context, logical: torch.Tensor, sizes: Sizes, caps: Sequence[int]) -> torch.Tensor:
    """Positions in a flattened tensor of true `sizes` as positions in its buffer of `caps`."""
    place, stride = torch.zeros_like(logical), 1
    for d in reversed(range(len(sizes))):
        count = context.count(sizes[d])
        count = count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)
        last = d == 0
        place = place + (logical if last else logical % count) * stride
        logical = logical if last else torch.div(logical, count, rounding_mode="floor")
        stride *= caps[d]
    return place
