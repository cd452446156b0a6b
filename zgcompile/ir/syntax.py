"""The statements of a printed FX graph: `reader` makes them from text, `parser` gives them meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zgcompile.errors import SourceLine


@dataclass(frozen=True)
class Place:
    """1-based line and column of the text."""

    line: int
    column: int


@dataclass(frozen=True)
class Literal:
    value: Any
    at: Place


@dataclass(frozen=True)
class Name:
    """A value (`%3`), an input, a size, or a word such as `f32`."""

    text: str
    at: Place


@dataclass(frozen=True)
class Items:
    items: tuple[Expression, ...]
    at: Place


@dataclass(frozen=True)
class Operation:
    """`sign` applied to `operands`: an infix sign, `-` with one operand, or a function such as `max`."""

    sign: str
    operands: tuple[Expression, ...]
    at: Place


Expression = Literal | Name | Items | Operation


@dataclass(frozen=True)
class TypeText:
    """`kind` is a dtype, `float`, `int`, `object`, `none` or `tuple`; `text` is the type as printed, without spaces."""

    kind: str
    dims: tuple[tuple[Expression, int | None], ...]
    text: str
    at: Place
    device: str = ""


@dataclass(frozen=True)
class Bounds:
    """A `span=[low, below <= high)`; None is infinite."""

    low: int | None
    high: int | None
    below: Expression | None


@dataclass(frozen=True)
class Result:
    """A name, or `_`, with its type and what is known of it."""

    name: str
    at: Place
    type: TypeText | None = None
    pad: str | None = None
    span: Bounds | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Call:
    """`op(arguments, keyword=...)`; an argument marked `!` is written."""

    op: str
    at: Place
    arguments: tuple[Expression, ...]
    keywords: dict[str, Expression]


@dataclass(frozen=True)
class Part:
    """`%3[1]`: one result of several."""

    of: Name
    index: int
    at: Place


@dataclass(frozen=True)
class Constant:
    """`constant(...)`: a small tensor."""

    value: Expression
    at: Place


@dataclass(frozen=True)
class Declaration:
    """`n2 <= 512: unique(%9) below 1000`."""

    name: str
    cap: int | None
    kind: str
    operand: Name
    below: int | None
    at: Place
    source: SourceLine | None


@dataclass(frozen=True)
class Assignment:
    results: tuple[Result, ...]
    right: Call | Part | Constant
    source: SourceLine | None


@dataclass(frozen=True)
class Write:
    """`w <- %3`, `grad(w) <- None`, or `gated(%2) w <- %3`."""

    target: Name
    grad: bool
    good: Name | None
    new: Expression
    at: Place
    source: SourceLine | None


@dataclass(frozen=True)
class Requirement:
    expr: Expression
    value: bool


Statement = Declaration | Assignment | Write | Requirement


@dataclass
class FxGraphText:
    inputs: list[Result]
    statements: list[Statement] = field(default_factory=list)
    returns: tuple[Expression, ...] = ()
