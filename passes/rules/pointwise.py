"""Elementwise ops: pads stay pads. Scalars that are symbols are data and come from the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded, Number, Pad, Size

aten = torch.ops.aten
SYMBOLIC = (Bounded, Size, Number)
ZERO_PRESERVING = {
    aten.neg.default, aten.relu.default, aten.abs.default, aten.sqrt.default, aten._to_copy.default, aten.clone.default,
    aten.tanh.default, aten.sin.default, aten.sign.default, aten.expm1.default, aten.log1p.default,
}  # fmt: skip


@rule(
    "abs.default", "add.Tensor", "add.Scalar", "sub.Tensor", "rsub.Scalar", "rsub.Tensor", "mul.Tensor", "mul.Scalar",
    "div.Tensor", "div.Scalar", "div.Tensor_mode", "_to_copy.default", "clone.default",
    "native_dropout_backward.default", "masked_fill.Scalar", "masked_fill.Tensor", "where.self",
    "threshold_backward.default", "addcmul.default", "addcdiv.default", "lerp.Scalar", "lerp.Tensor",
    "leaky_relu.default", "leaky_relu_backward.default", "elu_backward.default",
    "gelu_backward.default", "sigmoid_backward.default", "tanh_backward.default",
    "softplus_backward.default", "hardtanh_backward.default", "log_sigmoid_forward.default",
    "log_sigmoid_backward.default", "fill.Scalar", "fill.Tensor", "_prelu_kernel.default",
    "glu.default", "glu_backward.default",
    "_prelu_kernel_backward.default", "hardswish.default", "hardswish_backward.default", "hardsigmoid.default",
    "hardsigmoid_backward.default", "floor_divide.default",
)  # fmt: skip
def elementwise(context: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    """Any op that ATen tags pointwise; listed are those that some torch release does not tag."""
    operands, options = tree_map(
        lambda v: _value(context, node, v), (args, kwargs), is_leaf=lambda v: isinstance(v, SYMBOLIC)
    )
    target = node.target
    if _has_symbolic_scalar((args, kwargs)):
        if target in SCALED:
            return SCALED[target](*operands, **options)
        target = target.overloadpacket  # type: ignore[union-attr]
    result = target(*operands, **options)  # type: ignore[operator]
    if target in ZERO_PRESERVING and isinstance(args[0], Bounded) and args[0].pad is Pad.ZERO:
        return result, Pad.ZERO
    return result


def _fitted(context: Context, node: Node, value: Bounded) -> torch.Tensor:
    """The data at the caps of the result: sizes that are equal only by a condition of the trace (`x[1:] - x[:-1]`) may
    have other caps. Where the condition fails, so does the status."""
    out = node.meta.get("val")
    data = value.data
    if not isinstance(out, torch.Tensor) or value.dim() > out.dim():
        return data
    for d in value.dynamic():
        back = d - value.dim()
        size, cap = data.shape[d], context.cap(out.shape[back])
        if size > cap:
            data = data.narrow(d, 0, cap)
        elif size < cap:
            data = torch.constant_pad_nd(data, [0, 0] * (-back - 1) + [0, cap - size])
    return data


def _value(context: Context, node: Node, value: Any) -> Any:
    """Data. A number from the device is a 0-d tensor of the type in which ATen would take a Python number."""
    if isinstance(value, Bounded):
        return _fitted(context, node, value)
    if not isinstance(value, (Size, Number)):
        return value
    number = context.count_tensor(value) if isinstance(value, Size) else value.value
    out = next(v.dtype for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
    if out == torch.bool:  # a comparison is made in the type of its tensor
        tensors = [a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
        out = next((t for t in tensors if t.is_floating_point or not number.is_floating_point()), number.dtype)
    return number.to(out) if out.is_floating_point or not number.is_floating_point() else number


def _has_symbolic_scalar(tree: Any) -> bool:
    return any(isinstance(v, (Size, Number)) for v in tree_leaves(tree, is_leaf=lambda v: isinstance(v, SYMBOLIC)))


def _add(a: Any, b: Any, alpha: Any = 1) -> Any:
    return torch.add(a, b * alpha)


def _sub(a: Any, b: Any, alpha: Any = 1) -> Any:
    return torch.sub(a, b * alpha)


def _rsub(a: Any, b: Any, alpha: Any = 1) -> Any:
    return torch.sub(b, a * alpha)


def _addcmul(a: Any, b: Any, c: Any, *, value: Any = 1) -> Any:
    return a + value * b * c


def _addcdiv(a: Any, b: Any, c: Any, *, value: Any = 1) -> Any:
    return a + value * (b / c)


def _lerp(a: Any, b: Any, weight: Any) -> Any:
    return torch.lerp(a, b, weight if isinstance(weight, torch.Tensor) else torch.full_like(a, weight))


def _clamp(a: Any, min: Any = None, max: Any = None) -> Any:
    """Bounds are numbers or 0-d tensors."""
    for bound, tensor_op, name in ((min, torch.maximum, "min"), (max, torch.minimum, "max")):
        if bound is not None:
            a = tensor_op(a, bound.to(a.dtype)) if isinstance(bound, torch.Tensor) else a.clamp(**{name: bound})
    return a


# Ops whose schema takes a plain number where the lowered step has a 0-d tensor.
SCALED: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Scalar: _lerp,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda a, max: _clamp(a, None, max),
}


@rule("copy.default")
def copy(context: Context, node: Node, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """`target` with the values of `source`, cast and broadcast."""
    del non_blocking
    data = context.raw(target)
    return context.raw(source).to(data.dtype).expand(data.shape).clone()
