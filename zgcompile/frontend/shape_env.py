"""The ShapeEnv of a capture: sizes start at 2, and every comparison that this decided is remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from zgcompile.errors import SourceLine
from zgcompile.frontend.refusal import LoopWatch
from zgcompile.ir.source import current_user_line, user_line_from_traceback

SMALLEST_TRACED_SIZE = 2


@dataclass(frozen=True)
class Precondition:
    """A comparison of sizes that the trace took as `value`; a batch where it comes out otherwise runs the user's own
    function."""

    expr: sympy.Basic
    value: bool
    where: SourceLine | None

    def __str__(self) -> str:
        return str(self.expr) if self.value else f"not {self.expr}"


class EnvelopeShapeEnv(ShapeEnv):
    """Size-like unbacked symbols range from 2, so that checks such as `numel() == 0` trace (design 3.4).

    That range is an assumption. `preconditions` holds each comparison that it alone decided, with the user's line; a
    comparison made through `guard_or_false` and its kin asks for no decision and is not one of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.preconditions: dict[tuple[sympy.Basic, bool], Precondition] = {}
        self.recording = True
        self.loops = LoopWatch()
        self.undecided: list[GuardOnDataDependentSymNode] = []

    def _constrain_range_for_size(self, a: sympy.Symbol, min: int | None = None, max: int | None = None) -> None:
        lower = SMALLEST_TRACED_SIZE if min is None or min < SMALLEST_TRACED_SIZE else min
        super()._constrain_range_for_size(a, min=lower, max=max)

    def evaluate_expr(
        self,
        orig_expr: sympy.Basic,
        hint: Any = None,
        fx_node: torch.fx.Node | None = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        **options: Any,
    ) -> sympy.Basic:
        try:
            value = super().evaluate_expr(orig_expr, hint, fx_node, size_oblivious, fallback_value, **options)
        except GuardOnDataDependentSymNode as error:
            self.undecided.append(error)
            raise
        if self.recording and fallback_value is None:
            self._record(orig_expr, value)
        return value

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch's is wrapped by a cache
        self, orig_expr: sympy.logic.boolalg.Boolean, msg: str, fx_node: torch.fx.Node | None = None
    ) -> bool:
        """`torch._check`: one on sizes that the smallest traced size alone has decided is a precondition too."""
        holds = super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)
        if self.recording and all(symbol.is_integer for symbol in orig_expr.free_symbols):
            self._record(orig_expr, sympy.sympify(bool(holds)))
        return holds

    def raise_swallowed(self) -> None:
        """Raise anew a decision that could not be made and that the user's own `except` has caught: the trace went
        where eager does not. One that a library caught below the user's code, who knew what to do then, shows by its
        traceback, which ends in the frame that caught it."""
        errors, self.undecided = self.undecided, []  # their tracebacks hold the trace's frames
        for error in errors:
            if user_line_from_traceback(error.__traceback__) is not None:
                raise error

    def _record(self, expr: sympy.Basic, value: sympy.Basic) -> None:
        symbols = free_unbacked_symbols(expr)
        if not symbols or not isinstance(expr, sympy.logic.boolalg.Boolean):
            return
        honest = {s: ValueRanges(0, self.var_to_range[s].upper) for s in symbols if s in self.var_to_range}
        if len(honest) == len(symbols) and bound_sympy(expr, honest).is_singleton():
            return
        self.loops.decided()
        key = (expr, bool(value))
        self.preconditions.setdefault(key, Precondition(expr, bool(value), current_user_line()))

    def hyperparameter(self, name: str, value: float) -> float | torch.SymFloat:
        """A float that the host may change between calls: symbolic in arithmetic, its present value decides
        comparisons."""
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(name)
        symbol = self.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        return self.create_symfloatnode(symbol, hint=value, source=source)
