"""Running sums, products and extremes: only what lies in front of an element counts, so pads stay pads."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Bounded


@rule("cumsum.default", "cumprod.default", "cummax.default", "cummin.default", "logcumsumexp.default")
def scan(context: Context, node: Node, source: Bounded, dim: int, **options: Any) -> Any:
    return node.target(context.raw(source), dim, **options)  # type: ignore[operator]
