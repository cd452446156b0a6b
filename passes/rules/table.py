"""The rule table: ATen overload -> rule. One rule an overload; an op without one is a compile error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.fx import Node

from zgcompile.errors import InternalError, UnsupportedOp
from zgcompile.ir.source import user_line_from_stack_trace

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
MODULES = (
    "arguments", "contraction", "counting", "demands", "draws", "extremes", "index_put", "indexing",
    "joining", "losses", "masks", "pointwise",
    "reductions", "rowwise", "scans", "scatter", "shaping", "slicing", "sorting", "unique", "variance", "views",
)  # fmt: skip


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ATen overloads given as "name.overload" (or "namespace::name.overload").

    A rule takes `(context, node, *args, **kwargs)` with the FX node's arguments as Bounded, Tensor, Size, Number or
    plain values, and returns the data of the result at cap, or `(data, Pad)`; for a tuple of results, a tuple of these.
    An overload that this torch lacks is skipped.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            for overload in _overloads(op):
                if overload in RULES:
                    raise InternalError(f"two rules for {overload}")
                RULES[overload] = function
        return function

    return register


def _overloads(op: str) -> Iterator[Any]:
    namespace, _, name = op.rpartition("::")
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops, namespace or "aten"), packet, None)
    if found is not None and hasattr(found, overload or "default"):
        yield getattr(found, overload or "default")


@cache
def load_rules() -> dict[Any, Rule]:
    """The whole table."""
    for module in MODULES:
        import_module(f"zgcompile.passes.rules.{module}")
    return RULES


def find_rule(op: Any) -> Rule | None:
    """The rule of an op: its own, or that of `aten.abs`, the plain elementwise one, where ATen tags the op
    pointwise."""
    table = load_rules()
    found = table.get(op)
    if found is None and torch.Tag.pointwise in getattr(op, "tags", ()):
        return table[torch.ops.aten.abs.default]
    return found


def refuse(node: Node, what: str, advice: str) -> UnsupportedOp:
    """The error for a use of an op that has a rule, but not for this."""
    return UnsupportedOp(
        f"{node.target}: {what}", where=user_line_from_stack_trace(node.meta.get("stack_trace") or ""), advice=advice
    )
