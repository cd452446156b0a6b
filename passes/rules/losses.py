"""nll_loss: pad targets become `ignore_index`, so the op itself counts valid rows only, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from zgcompile.ir.bounded import Bounded
from zgcompile.ir.spans import span_of
from zgcompile.ir.status import Failure
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule


def _targets(context: Context, node: Node, scores: Any, target: Any, target_node: Any, ignore: int) -> Any:
    """Targets with pads ignored; a valid class out of range is a user error and is ignored too, so that nothing asserts."""
    classes = int(context.raw(scores).shape[-1])
    clean = context.select(target, ignore)
    span = span_of(target_node)
    if not (span.low >= 0 and span.high <= classes):
        wrong = ((clean < 0) | (clean >= classes)) & (clean != ignore)
        context.check(wrong.any(), Failure.USER_ERROR, "target class out of range in nll_loss", node)
        clean = torch.where(wrong, ignore, clean)
    return clean


@rule("nll_loss_forward.default")
def nll_loss_forward(context: Context, node: Node, scores: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    clean = _targets(context, node, scores, target, node.args[1], ignore)
    return node.target(context.raw(scores), clean, context.raw(weight), reduction, ignore)  # type: ignore[operator]


@rule("nll_loss_backward.default")
def nll_loss_backward(context: Context, node: Node, grad: Any, scores: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any) -> Any:
    clean = context.select(target, ignore)
    classes = int(context.raw(scores).shape[-1])
    clean = torch.where((clean < 0) | (clean >= classes), ignore, clean) if isinstance(target, Bounded) else clean
    return node.target(context.raw(grad), context.raw(scores), clean, context.raw(weight), reduction, ignore, total)  # type: ignore[operator]
