"""Turns what tracing raises into a refusal that names the user's line and what to write there instead."""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from zgcompile.errors import CaptureRefused, SourceLine, ZgError
from zgcompile.ir.source import user_line_from_traceback

BRANCH_ADVICE = {
    "if": "compute both sides and choose with torch.where, or test a size (x.numel() == 0) instead of values",
    "while": "give the loop a static number of rounds and mask the finished rows",
    "for": "write the loop as tensor operations over all rows, or give it a static number of rounds",
    "assert": "check the values outside the step, on what it returns",
}


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Within it, a data-dependent decision raises `CaptureRefused`; the user's own exceptions pass unchanged."""
    try:
        yield
    except ZgError:
        raise
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        where = user_line_from_traceback(error.__traceback__)
        statement = statement_at(where)
        raise CaptureRefused(
            f"Python control flow on a device value ({statement or 'a decision'}) cannot be captured",
            where=where,
            advice=BRANCH_ADVICE.get(statement or "", "keep the value a tensor: torch.where, torch.clamp, a mask"),
        ) from error
    except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise CaptureRefused(
            f"the op {getattr(error, 'func', error)} cannot be traced",
            where=user_line_from_traceback(error.__traceback__),
            advice="replace it by an op that zgcompile supports, or move it out of the step",
        ) from error
    except (TypeError, RuntimeError, ValueError) as error:
        if not _needs_a_concrete_number(error):
            raise
        raise CaptureRefused(
            "a number read from a device value is needed as a plain Python number here",
            where=user_line_from_traceback(error.__traceback__),
            advice="use it as a size or in tensor arithmetic, or keep it a tensor",
        ) from error


def _needs_a_concrete_number(error: Exception) -> bool:
    text = str(error)
    marks = ("Could not extract specialized integer", "SymInt", "SymFloat", "symbolic", "data-dependent", "FakeTensor")
    return any(mark in text for mark in marks)


def statement_at(where: SourceLine | None) -> str | None:
    """The kind of statement ('if', 'while', 'for', 'assert') that owns the line, found in the file's syntax tree."""
    if where is None:
        return None
    source = "".join(linecache.getlines(where.file))
    with contextlib.suppress(SyntaxError):
        kinds = {ast.If: "if", ast.IfExp: "if", ast.While: "while", ast.For: "for", ast.Assert: "assert"}
        for node in ast.walk(ast.parse(source)):
            kind = kinds.get(type(node))
            test = getattr(node, "test", getattr(node, "iter", None))
            if kind and test is not None and test.lineno <= where.line <= (test.end_lineno or test.lineno):
                return kind
    return None
