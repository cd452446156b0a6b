"""nll_loss: pad targets become `ignore_index`, so the op itself counts valid rows only, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

from zgcompile.ir.bounded import Pad
from zgcompile.ir.spans import span_of
from zgcompile.ir.status import Failure


def _targets(context: Context, scores: Any, target: Any, ignore: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets with pads and whatever is no class ignored, so that no kernel asserts; and where the latter are."""
    clean = context.select(target, ignore)
    wrong = ((clean < 0) | (clean >= context.raw(scores).shape[-1])) & (clean != ignore)
    return torch.where(wrong, ignore, clean), wrong


@rule("nll_loss_forward.default")
def nll_loss_forward(
    context: Context, node: Node, scores: Any, target: Any, weight: Any, reduction: int, ignore: int
) -> Any:
    clean, wrong = _targets(context, scores, target, ignore)
    span = span_of(node.args[1])
    if not (span.low >= 0 and span.high <= context.raw(scores).shape[-1]):
        context.check(wrong.any(), Failure.USER_ERROR, "target class out of range in nll_loss", node)
    return node.target(context.raw(scores), clean, context.raw(weight), reduction, ignore)  # type: ignore[operator]


@rule("nll_loss_backward.default")
def nll_loss_backward(
    context: Context,
    node: Node,
    grad: Any,
    scores: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore: int,
    total: Any,
) -> Any:
    """Rows of ignored targets get no gradient at all."""
    clean, _ = _targets(context, scores, target, ignore)
    return node.target(
        context.raw(grad), context.raw(scores), clean, context.raw(weight), reduction, ignore, total
    ), Pad.ZERO  # type: ignore[operator]
