"""Arithmetic on SymFloats (hyperparameters, `.item()` of a float): float64 on the device, as Python does it on the
host."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context

from zgcompile.errors import UnsupportedOp
from zgcompile.ir.bounded import Number, Size
from zgcompile.ir.source import user_line_from_stack_trace

OPERATORS: dict[Any, Callable[..., torch.Tensor]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.floordiv: operator.floordiv,
    operator.mod: operator.mod,
    operator.pow: operator.pow,
    operator.neg: operator.neg,
    operator.abs: operator.abs,
    pow: operator.pow,
    torch.sym_float: lambda x: x,
    # Python's: the first operand unless the second is beyond it, so that NaN is no number to compare with.
    torch.sym_max: lambda a, b: torch.where(b > a, b, a),
    torch.sym_min: lambda a, b: torch.where(b < a, b, a),
    math.sqrt: torch.sqrt,
    math.exp: torch.exp,
    math.log: torch.log,
}
for _name in ("sqrt", "exp", "log", "log2", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan"):
    if hasattr(torch, f"_sym_{_name}"):
        OPERATORS[getattr(torch, f"_sym_{_name}")] = getattr(torch, _name)


def float_expression(context: Context, node: Node, args: tuple[Any, ...]) -> Number:
    """The value of a SymFloat node. Every operand is float64: `n / m` of two counts divides as Python's `/`."""
    op = OPERATORS.get(node.target)
    if op is None:
        raise UnsupportedOp(
            f"{node.target} on a number that lives on the device",
            where=user_line_from_stack_trace(node.meta.get("stack_trace") or ""),
            advice="keep the value a tensor and use the torch function",
        )

    def operand(value: Any) -> torch.Tensor:
        if isinstance(value, Number):
            return value.value
        if isinstance(value, Size):
            return context.count_tensor(value).to(torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=context.device)

    return Number(op(*[operand(a) for a in args]))
