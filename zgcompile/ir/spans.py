"""Proven value ranges of integer tensors: `low <= value < high` on every valid element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import Node

INT64_LOW, INT64_HIGH = -(2**63), 2**63


@dataclass(frozen=True)
class Span:
    """Valid values lie in [low, high). `below` is a size expression that they are also below, where one is known."""

    low: int = INT64_LOW
    high: int = INT64_HIGH
    below: sympy.Expr | None = None

    def inside(self, size: int | sympy.Expr) -> bool:
        """Every value is a valid, non-negative index into a dimension of that size."""
        if self.low < 0:
            return False
        if isinstance(size, int):
            return self.high <= size
        return self.below is not None and self.below == size

    def union(self, other: Span) -> Span:
        below = self.below if self.below == other.below else None
        return Span(min(self.low, other.low), max(self.high, other.high), below)

    @property
    def known(self) -> bool:
        return self.low > INT64_LOW or self.high < INT64_HIGH


UNKNOWN = Span()


def span_of(value: Any) -> Span:
    """The span that infer-bounds noted on an FX node."""
    return value.meta.get("span", UNKNOWN) if isinstance(value, Node) else UNKNOWN
