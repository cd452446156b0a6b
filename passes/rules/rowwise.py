"""Softmax and layer norm: rows are independent; along a dynamic dimension pads become the identity."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import refuse, rule

from zgcompile.ir.bounded import Bounded


@rule("_softmax.default", "_log_softmax.default")
def softmax(context: Context, node: Node, source: Bounded, dim: int, half_to_float: bool) -> Any:
    return node.target(context.select(source, -math.inf, [dim]), dim, half_to_float)  # type: ignore[operator]


@rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def softmax_backward(context: Context, node: Node, grad: Any, output: Any, dim: int, dtype: Any) -> Any:
    return node.target(context.select(grad, 0, [dim]), context.select(output, 0, [dim]), dim, dtype)  # type: ignore[operator]


@rule("native_layer_norm.default")
def layer_norm(context: Context, node: Node, source: Bounded, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    _refuse_normalised(node, "layer norm", source, shape)
    return node.target(context.raw(source), shape, context.raw(weight), context.raw(bias), eps)  # type: ignore[operator]


@rule("native_layer_norm_backward.default")
def layer_norm_backward(
    context: Context,
    node: Node,
    grad: Any,
    source: Any,
    shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    mask: Any,
) -> Any:
    """The gradients of weight and bias sum over rows: zero both factors on pads, whose rstd may be infinite."""
    _refuse_normalised(node, "layer norm", source, shape)
    zeroed = [context.select(v, 0) for v in (grad, source)]
    statistics = [context.select(v, 0) for v in (mean, rstd)]
    return node.target(*zeroed, shape, *statistics, context.raw(weight), context.raw(bias), mask)  # type: ignore[operator]


@rule("native_group_norm.default")
def group_norm(context: Context, node: Node, source: Bounded, weight: Any, bias: Any, *sizes: Any) -> Any:
    """Groups lie within a row."""
    _refuse_normalised(node, "group norm", source, source.sizes[1:])
    return node.target(source.data, context.raw(weight), context.raw(bias), *context.raw(sizes))  # type: ignore[operator]


@rule("native_group_norm_backward.default")
def group_norm_backward(
    context: Context, node: Node, grad: Any, source: Any, mean: Any, rstd: Any, weight: Any, *sizes: Any
) -> Any:
    """As for layer norm."""
    zeroed = [context.select(v, 0) for v in (grad, source, mean, rstd)]
    return node.target(*zeroed, context.raw(weight), *context.raw(sizes))  # type: ignore[operator]


def _refuse_normalised(node: Node, name: str, source: Any, shape: Any) -> None:
    if isinstance(source, Bounded) and any(d >= source.dim() - len(shape) for d in source.dynamic()):
        raise refuse(node, f"{name} over a dynamic dimension", "normalise over static dimensions")
