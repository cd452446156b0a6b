"""Matrix products: rows are independent; a contracted dynamic dimension needs zero pads on both operands (0 x NaN is NaN)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule


@rule("mm.default", "bmm.default", "addmm.default", "baddbmm.default", "mv.default", "dot.default", "addmv.default")
def product(context: Context, node: Node, *args: Any, **kwargs: Any) -> torch.Tensor:
    *bias, left, right = args
    left_sizes = context.sizes_of(left)
    kwargs = {k: context.scalar(v) for k, v in kwargs.items()}
    if isinstance(left_sizes[-1], int):
        return node.target(*context.raw(bias), context.raw(left), context.raw(right), **kwargs)  # type: ignore[operator]
    contracted = 0 if len(context.sizes_of(right)) == 1 else len(context.sizes_of(right)) - 2
    clean_left = context.select(left, 0, [len(left_sizes) - 1]) if isinstance(left, Bounded) else left
    clean_right = context.select(right, 0, [contracted]) if isinstance(right, Bounded) else right
    return node.target(*context.raw(bias), clean_left, clean_right, **kwargs)  # type: ignore[operator]
