"""Matrix products: rows are independent; a contracted dynamic dimension needs zero pads on both operands (0 x NaN is
NaN)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded


def _cleaned(context: Context, operand: Any, dims: Iterable[int]) -> torch.Tensor:
    return context.select(operand, 0, dims) if isinstance(operand, Bounded) else operand


def _scale(context: Context, bias: Any, product: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """`beta * bias + alpha * product` with factors from the device."""
    return context.raw(bias) * context.scalar(beta) + product * context.scalar(alpha)


@rule("mm.default", "bmm.default", "mv.default", "dot.default", "vdot.default")
def product(context: Context, node: Node, left: Any, right: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(context.sizes_of(left)[-1], int):
        return node.target(context.raw(left), context.raw(right), *args, **kwargs)  # type: ignore[operator]
    clean = _cleaned(context, left, [-1]), _cleaned(context, right, [0 if context.raw(right).dim() == 1 else -2])
    return node.target(*clean, *args, **kwargs)  # type: ignore[operator]


@rule("addmm.default", "baddbmm.default", "addmv.default")
def added_product(context: Context, node: Node, bias: Any, left: Any, right: Any, **kwargs: Any) -> torch.Tensor:
    if not isinstance(context.sizes_of(left)[-1], int):
        left, right = (
            _cleaned(context, left, [-1]),
            _cleaned(context, right, [0 if context.raw(right).dim() == 1 else -2]),
        )
    plain = {k: context.scalar(v) for k, v in kwargs.items()}
    if any(isinstance(v, torch.Tensor) for v in plain.values()):
        return _scale(
            context,
            bias,
            torch.matmul(context.raw(left), context.raw(right)),
            plain.get("beta", 1),
            plain.get("alpha", 1),
        )
    return node.target(*context.raw((bias, left, right)), **plain)  # type: ignore[operator]


@rule("addbmm.default")
def summed_products(context: Context, node: Node, bias: Any, left: Any, right: Any, **kwargs: Any) -> torch.Tensor:
    """The batch is summed over as well."""
    clean = _cleaned(context, left, [0, -1]), _cleaned(context, right, [0, -2])
    return node.target(context.raw(bias), *clean, **{k: context.scalar(v) for k, v in kwargs.items()})  # type: ignore[operator]
