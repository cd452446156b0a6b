"""What eager demands of values: assertions, and the errors of linear algebra."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from zgcompile.passes.rules.context import Context
from zgcompile.passes.rules.table import rule

from zgcompile.ir.demands import message_of
from zgcompile.ir.status import Failure


@rule("_assert_async.default", "_assert_async.msg")
def assert_async(context: Context, node: Node, value: Any, message: str = "") -> None:
    """Eager stops the process's CUDA context; here only the step fails."""
    del message
    context.check(context.raw(value).reshape(()) == 0, Failure.USER_ERROR, message_of(node), node)


@rule("_linalg_check_errors.default")
def linalg_check_errors(context: Context, node: Node, info: Any, api_name: str, *, is_matrix: bool) -> None:
    """The step may handle the exception, so the function itself has to meet it."""
    del is_matrix
    context.check((context.select(info, 0) != 0).any(), Failure.USER_ERROR, f"{api_name} fails", node)
