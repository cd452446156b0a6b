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
from zgcompile.ir.status import Failure

aten = torch.ops.aten
SYMBOLIC = (Bounded, Size, Number)
HALF = (torch.float16, torch.bfloat16)
WIDE = (aten.mul, aten.div, aten.floor_divide, aten.lerp, aten.addcmul, aten.addcdiv)
DIVISIONS = (aten.div, aten.floor_divide, aten.remainder, aten.fmod)
WIDE_ON_CUDA = (aten.add, aten.sub, aten.rsub)
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
    target, out = node.target, node.meta.get("val")
    numbers = _has_symbolic_scalar((args, kwargs))
    wide = numbers and _is_half(out) and _is_wide(context, target)
    operands, options = tree_map(
        lambda v: _value(context, node, v, wide), (args, kwargs), is_leaf=lambda v: isinstance(v, SYMBOLIC)
    )
    if _divides_integers(context, target, out):
        operands = (operands[0], _divisor(context, args[0], args[1], operands[1]), *operands[2:])
    if target is aten.pow.Tensor_Scalar and numbers and not args[0].dtype.is_floating_point:
        _check_exponent(context, node, operands[1])
    if numbers:
        op = SCALED.get(target, target.overloadpacket)  # type: ignore[union-attr]
        result = op(*operands, **options)
        return result.to(out.dtype) if wide else result  # type: ignore[union-attr]
    result = target(*operands, **options)  # type: ignore[operator]
    if target in ZERO_PRESERVING and isinstance(args[0], Bounded) and args[0].pad is Pad.ZERO:
        return result, Pad.ZERO
    return result


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _divides_integers(context: Context, op: Any, out: Any) -> bool:
    """A CPU raises an error for an integer divisor of zero, be it a pad."""
    integral = isinstance(out, torch.Tensor) and not out.dtype.is_floating_point
    return integral and op.overloadpacket in DIVISIONS and context.device.type == "cpu"


def _divisor(context: Context, numerator: Any, divisor: Any, data: Any) -> Any:
    """One at the pads; all of it where the numerator has no elements. Valid zeros stay eager's error."""
    if isinstance(divisor, Bounded):
        valid = context.all_valid(Bounded(data, divisor.sizes))
    elif isinstance(divisor, (Size, Number)) or (isinstance(divisor, torch.Tensor) and isinstance(numerator, Bounded)):
        valid = context.elements(context.sizes_of(numerator)) > 0
    else:
        valid = None
    return data if valid is None else torch.where(valid, data, torch.ones((), dtype=data.dtype, device=data.device))


def _check_exponent(context: Context, node: Node, exponent: torch.Tensor) -> None:
    if not exponent.dtype.is_floating_point:
        context.check(exponent < 0, Failure.USER_ERROR, "an integer to a negative integer power", node)


def _is_wide(context: Context, op: Any) -> bool:
    """Whether ATen takes a Python number beside a half tensor as float32 and rounds only the result."""
    return op.overloadpacket in WIDE or (op.overloadpacket in WIDE_ON_CUDA and context.device.type == "cuda")


def _value(context: Context, node: Node, value: Any, wide: bool = False) -> Any:
    """Data. A number from the device is a 0-d tensor of the type in which ATen would take a Python number.

    `wide`: that type is float32, and half tensors are brought to it."""
    if isinstance(value, (Bounded, torch.Tensor)):
        out = node.meta.get("val")
        fits = isinstance(value, Bounded) and isinstance(out, torch.Tensor)
        data = context.fitted(value, out.shape) if fits else context.raw(value)  # type: ignore[union-attr]
        return data.to(torch.float32) if wide and _is_half(data) else data
    if not isinstance(value, (Size, Number)):
        return value
    number = context.count_tensor(value) if isinstance(value, Size) else value.value
    if wide:
        return number.to(torch.float32)
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
            if isinstance(bound, torch.Tensor):
                a = a.to(bound.dtype) if bound.is_floating_point() and not a.is_floating_point() else a
                a = tensor_op(a, bound.to(a.dtype))
            else:
                a = a.clamp(**{name: bound})
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
    values = context.aligned(node, source, context.sizes_of(target))
    return values.to(data.dtype).expand(data.shape).clone()
