"""Sizes that are sums and maxima of values: repeat_interleave and bincount."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded, Pad
from zgcompile.ir.status import Failure


@rule("repeat_interleave.Tensor")
def repeat_interleave(context: Context, node: Node, repeats: Any, output_size: Any = None) -> Any:
    """Index of the row that each output row repeats; the total is the new size, or has to be the given one."""
    del output_size
    out = node.meta["val"]
    n = context.count_tensor(context.sizes_of(repeats)[0])
    index, total = torch.ops.zgcompile.repeat_interleave(context.raw(repeats), n, context.cap(out.shape[0]))
    context.check(total < 0, Failure.USER_ERROR, "repeats can not be negative", node)
    context.bind_output(node, total, out, 0)
    return index.to(out.dtype), Pad.ZERO


@rule("bincount.default")
def bincount(context: Context, node: Node, source: Any, weights: Any = None, minlength: Any = 0) -> Any:
    """Occurrences of each value; the size is max(largest + 1, minlength)."""
    values, out = context.bounded(source), node.meta["val"]
    if weights is not None and not out.dtype.is_floating_point:
        raise refuse(
            node,
            f"this torch release takes weighted counts to be {out.dtype}",
            "use torch.zeros(k).index_add(0, index, weights)",
        )
    if weights is not None:
        context.check_same(node, values.sizes[0], context.sizes_of(weights)[0])
        if values.dynamic():  # without values eager returns int64, whatever the weights
            empty = context.count_tensor(values.sizes[0]) == 0
            context.check(empty, Failure.PRECONDITION, "bincount of no values with weights", node)
        weights = Bounded(context.fitted(weights, values.sizes), values.sizes)
    cap, valid = context.cap(out.shape[0]), context.valid(values.sizes[0])
    context.check((valid & (values.data < 0)).any(), Failure.USER_ERROR, "bincount of a negative value", node)
    shortest = context.count_tensor(minlength).reshape(1)
    largest = torch.cat([torch.where(valid, values.data, -1).to(torch.int64) + 1, shortest]).amax()
    context.bind_output(node, largest, out, 0)
    place = torch.where(valid & (values.data >= 0) & (values.data < cap), values.data, cap).to(torch.int64)
    weight = valid if weights is None else context.select(weights, 0)
    return torch.zeros(cap + 1, dtype=out.dtype, device=out.device).scatter_add(0, place, weight.to(out.dtype))[
        :cap
    ], Pad.ZERO
