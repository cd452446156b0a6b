"""Bounded tensors: a static buffer of `cap` rows, a count on the device, and what the rows beyond the count hold."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import sympy
import torch


class Pad(enum.Enum):
    """What the pads of a bounded tensor hold."""

    ANY = "any"
    IN_RANGE = "in_range"  # integers that are zero or inside the tensor's proven value range
    ZERO = "zero"


@dataclass(frozen=True)
class Bounded:
    """`data` has every dynamic size at its cap; `sizes` are the true sizes, int or an expression in size symbols.

    Invariant: the elements whose every index is below the true size are the eager tensor; the others are pads.
    """

    data: torch.Tensor
    sizes: tuple[int | sympy.Expr, ...]
    pad: Pad = Pad.ANY

    def dynamic(self) -> list[int]:
        return [d for d, size in enumerate(self.sizes) if not isinstance(size, int)]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def dim(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Size:
    """A SymInt of the FX graph: an expression in size symbols. As a size it is its cap, as data its count."""

    expr: sympy.Expr


@dataclass(frozen=True)
class Number:
    """A SymFloat of the FX graph as data: a 0-d float64 tensor on the device."""

    value: torch.Tensor


def as_size(value: object) -> int | sympy.Expr:
    """The size that a SymInt or int of a fake tensor's shape stands for."""
    if isinstance(value, int):
        return value
    expr = value.node.expr  # type: ignore[attr-defined]
    return int(expr) if expr.is_Integer else expr
