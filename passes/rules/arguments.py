"""Where sizes enter: the rows of an argument, and values read with `.item()`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

from zgcompile.errors import InternalError
from zgcompile.ir.bounded import Number, Size
from zgcompile.ir.status import Failure


@rule("zgcompile::dynamic_rows")
def dynamic_rows(context: Context, node: Node, buffer: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """An argument: the static buffer itself, its count given by the caller."""
    context.bind_symbol(next(iter(node.meta["unbacked_bindings"])), length, node)
    return buffer


@rule("zgcompile::dynamic_rows_like")
def dynamic_rows_like(context: Context, node: Node, buffer: torch.Tensor, rows: Any) -> torch.Tensor:
    """An argument that shares its count with `rows`."""
    del context, node, rows
    return buffer


@rule("_local_scalar_dense.default")
def item(context: Context, node: Node, source: Any) -> Size | Number:
    """`.item()`: the value stays on the device, as a count where it is a size. A negative one is no size."""
    value, data = node.meta["val"], context.raw(source).reshape(())
    if isinstance(value, torch.SymFloat):
        return Number(data.to(torch.float64))
    if not isinstance(value, torch.SymInt):
        raise InternalError(f"{node}: an item of type {type(value).__name__}")
    symbol = value.node.expr
    if symbol not in context.true_counts:
        count = data.to(torch.int64)
        if symbol in context.caps:
            context.check(count < 0, Failure.PRECONDITION, f"{symbol} >= 0", node)
        context.bind_symbol(symbol, count, node)
    return Size(symbol)
