"""Size expressions: their upper bound over the caps, and their value from device counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

import sympy
import torch
from torch.utils._sympy import functions as sf
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from zgcompile.errors import InternalError

Value = int | float | bool | torch.Tensor
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)  # what a trace has in place of numbers that it does not know


def upper_bound(expr: int | sympy.Expr, caps: Mapping[sympy.Symbol, int]) -> int:
    """The largest value of `expr` while each symbol ranges over [0, cap].

    Raises:
        InternalError: a symbol has no cap, or the bound is infinite.
    """
    if isinstance(expr, int):
        return expr
    missing = [s for s in expr.free_symbols if s not in caps]
    if missing:
        raise InternalError(f"no capacity for the size symbol {missing[0]} in {expr}")
    bound = bound_sympy(expr, {s: ValueRanges(0, caps[s]) for s in expr.free_symbols}).upper
    if not bound.is_finite:
        raise InternalError(f"the size {expr} has no finite bound")
    return max(int(bound), 0)


def evaluate(expr: sympy.Basic, value_of: Callable[[sympy.Symbol], Value], memo: dict[sympy.Basic, Value]) -> Value:
    """The value of a size expression or comparison, `value_of` giving 0-d int64 tensors or ints for its symbols."""
    known = memo.get(expr)
    if known is None:
        known = memo[expr] = _evaluate(expr, value_of, memo)
    return known


def _evaluate(expr: sympy.Basic, value_of: Callable[[sympy.Symbol], Value], memo: dict[sympy.Basic, Value]) -> Value:
    if isinstance(expr, sympy.Symbol):
        return value_of(expr)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, (sympy.Float, sympy.Rational)):
        return float(expr)
    if isinstance(expr, sympy.logic.boolalg.BooleanAtom):
        return bool(expr)
    rule = next((r for kinds, r in _RULES if isinstance(expr, kinds)), None)
    if rule is None:
        raise InternalError(f"no rule for {type(expr).__name__} in the size expression {expr}")
    return rule([evaluate(arg, value_of, memo) for arg in expr.args])


def _fold(op: Callable[[Value, Value], Value]) -> Callable[[list[Value]], Value]:
    def run(args: list[Value]) -> Value:
        result = args[0]
        for arg in args[1:]:
            result = op(result, arg)
        return result

    return run


def _extreme(
    tensor_op: Callable[..., torch.Tensor], python_op: Callable[..., Value]
) -> Callable[[Value, Value], Value]:
    def run(a: Value, b: Value) -> Value:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return tensor_op(a, b)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            tensor, number = (a, b) if isinstance(a, torch.Tensor) else (b, a)
            assert isinstance(tensor, torch.Tensor)
            return tensor.clamp(min=number) if tensor_op is torch.maximum else tensor.clamp(max=number)
        return python_op(a, b)

    return run


def _divisor(b: Value) -> Value:
    """Division by a count of 0 is a check of its own (`Lowering`), and must not fault before that is read."""
    return torch.where(b == 0, 1, b) if isinstance(b, torch.Tensor) and not b.is_floating_point() else b


def _floor_divide(a: Value, b: Value) -> Value:
    b = _divisor(b)
    if isinstance(a, torch.Tensor):
        return torch.div(a, b, rounding_mode="floor")
    return torch.floor_divide(torch.full_like(b, a), b) if isinstance(b, torch.Tensor) else a // b


def _to_float(a: Value) -> Value:
    return a.to(torch.float64) if isinstance(a, torch.Tensor) else float(a)


def _absolute(a: Value) -> Value:
    return a.abs() if isinstance(a, torch.Tensor) else abs(a)


def _rounded(a: Value, tensor_op: Callable[..., torch.Tensor], python_op: Callable[..., int]) -> Value:
    return tensor_op(a).to(torch.int64) if isinstance(a, torch.Tensor) else python_op(a)


def _to_int(a: Value) -> Value:
    return a.to(torch.int64) if isinstance(a, torch.Tensor) else int(a)


_RULES: list[tuple[tuple[type, ...], Callable[[list[Value]], Value]]] = [
    ((sympy.Add,), _fold(lambda a, b: a + b)),
    ((sympy.Mul,), _fold(lambda a, b: a * b)),
    ((sympy.Max, sf.Max), _fold(_extreme(torch.maximum, max))),
    ((sympy.Min, sf.Min), _fold(_extreme(torch.minimum, min))),
    ((sf.FloorDiv, sf.CleanDiv), _fold(_floor_divide)),
    ((sf.Mod, sf.PythonMod), _fold(lambda a, b: a % _divisor(b))),
    ((sf.ToFloat,), lambda args: _to_float(args[0])),
    ((sf.TruncToInt,), lambda args: _to_int(args[0])),
    ((sf.FloorToInt,), lambda args: _rounded(args[0], torch.floor, math.floor)),
    ((sf.CeilToInt,), lambda args: _rounded(args[0], torch.ceil, math.ceil)),
    ((sf.RoundToInt,), lambda args: _rounded(args[0], torch.round, round)),
    ((sympy.Abs,), lambda args: _absolute(args[0])),
    ((sf.IntTrueDiv, sf.FloatTrueDiv), _fold(lambda a, b: _to_float(a) / b)),
    ((sf.PowByNatural, sf.FloatPow, sympy.Pow), _fold(lambda a, b: a**b)),
    ((sympy.Eq,), _fold(lambda a, b: a == b)),
    ((sympy.Ne,), _fold(lambda a, b: a != b)),
    ((sympy.Lt,), _fold(lambda a, b: a < b)),
    ((sympy.Le,), _fold(lambda a, b: a <= b)),
    ((sympy.Gt,), _fold(lambda a, b: a > b)),
    ((sympy.Ge,), _fold(lambda a, b: a >= b)),
    ((sympy.And,), _fold(operator.and_)),
    ((sympy.Or,), _fold(operator.or_)),
    ((sympy.Not,), lambda args: ~args[0] if isinstance(args[0], torch.Tensor) else not args[0]),
]
