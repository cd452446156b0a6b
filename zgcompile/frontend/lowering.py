"""The lowering of a captured step, with whatever it cannot bound refused by the user's line."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from zgcompile import pipeline
from zgcompile.errors import UnsupportedOp, ZgError
from zgcompile.frontend.asked import ROWS
from zgcompile.ir.bounds import Observed
from zgcompile.ir.envelope import Envelope
from zgcompile.ir.lowered import LoweredStep
from zgcompile.ir.program import StepProgram
from zgcompile.ir.source import user_line_from_stack_trace
from zgcompile.ir.spans import Span

_EXECUTED = re.compile(r"While executing %\w+ .*?target=(?:torch\.ops\.)?([\w.]+)")


def lowered_step(
    program: StepProgram, observed: Observed, envelope: Envelope, tables: Mapping[int, Span], device: torch.device
) -> LoweredStep:
    """`pipeline.lowered_step`; capacities are no exact sizes, so where one must equal another there may be no form.

    Raises:
        UnsupportedOp: naming the op and the line at which a rule, or torch on the capacities, gave up.
    """
    try:
        return pipeline.lowered_step(program, observed, envelope, tables, device)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except ZgError as error:
        where = user_line_from_stack_trace(_account(error))
        if error.where is not None or where is None:
            raise
        advice = error.advice or (ROWS if "size expression" in error.what else "")
        raise type(error)(error.what, where=where, advice=advice) from error
    except Exception as error:
        account = _account(error)
        executed = _EXECUTED.search(account)
        first = account.split("While executing")[0].strip().split("\n")[0] or type(error).__name__
        raise UnsupportedOp(
            f"{executed[1] if executed else 'the step'} has no form on capacities: a static size meets one that only "
            f"the device knows ({first})",
            where=user_line_from_stack_trace(account),
            advice="write the rows into a tensor of the static size: out = torch.zeros(...); out[torch.arange(n)] = x",
        ) from error


def _account(error: Exception) -> str:
    """What torch.fx appends to an error: the node, and the user's stack at which it was traced."""
    return "\n".join(str(part) for part in error.args)
