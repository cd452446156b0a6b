"""Turns what tracing raises into a refusal that names the user's line and what to write there instead."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from zgcompile.errors import CaptureRefused, SourceLine, UnsupportedOp, ZgError
from zgcompile.frontend.asked import KEEP_A_TENSOR, ROWS, asked
from zgcompile.ir.source import (
    is_user_file,
    raised_by_user,
    source_line,
    user_line_from_stack_trace,
    user_line_from_traceback,
)

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
    except ZgError as error:
        if error.where is None:
            raise type(error)(
                error.what, where=user_line_from_traceback(error.__traceback__), advice=error.advice
            ) from error
        raise
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        raise _decision(error) from error
    except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise CaptureRefused(
            f"the op {getattr(error, 'func', error)} cannot be traced",
            where=user_line_from_traceback(error.__traceback__),
            advice="replace it by an op that zgcompile supports, or move it out of the step",
        ) from error
    except Exception as error:
        met = asked(error.__traceback__)
        in_library = met is not None and met.library is not None and met.passes_a_device_value()
        if not in_library and not _needs_a_concrete_number(error):
            if type(error) is RuntimeError and met is not None and not raised_by_user(error):
                # An op's own, such as shapes that do not match: here in the words of a trace, deep in torch.
                first = str(error).strip().split("\n")[0]
                raise CaptureRefused(
                    f"RuntimeError: {first}",
                    where=met.where,
                    advice="see whether your own function fails there, too; if not, write that line in another way",
                ) from error
            raise
        account = None if met is None else met.account()
        if account is None and NUMPY_OBJECTS in str(error):
            account = "NumPy made an array of Python objects of a number that only the device knows", NUMPY_ADVICE
        what, advice = account or (
            "a number read from a device value is needed as a plain Python number here",
            KEEP_A_TENSOR,
        )
        raise CaptureRefused(what, where=None if met is None else met.where, advice=advice) from error


NUMPY_OBJECTS = "numpy.object_"
NUMPY_ADVICE = "torch.tensor([n, ...], device=...), which takes such numbers"


def _decision(error: Exception) -> ZgError:
    """A decision on what only the device knows: a statement's test, a call that wants a plain number, an op's own."""
    met = asked(error.__traceback__)
    where = met.where if met is not None else user_line_from_stack_trace("\n".join(map(str, error.args)))
    account = None if met is None else met.account()
    if account is not None:
        return CaptureRefused(account[0], where=where, advice=account[1])
    statement = statement_at(where)
    op = None if statement else _deciding_op(error.__traceback__)
    if op is not None:
        return UnsupportedOp(
            f"{op} makes a decision on a device value or size",
            where=where,
            advice=ROWS if op in CUTTING else "express it with ops that do not, or keep it outside the step",
        )
    if met is None or not met.symbolic:
        return CaptureRefused(
            f"Python control flow on a device value ({statement or 'a decision'}) cannot be captured",
            where=where,
            advice=BRANCH_ADVICE.get(statement or "", "keep the value a tensor: torch.where, torch.clamp, a mask"),
        )
    if statement is None and not isinstance(met.expression, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        return CaptureRefused(
            f"{met.text or 'this line'} needs a plain Python number, and this one only the device knows",
            where=where,
            advice=KEEP_A_TENSOR,
        )
    shown = " ".join(part for part in (statement, met.text) if part)
    return CaptureRefused(
        f"Python control flow on a number that only the device knows ({shown}) cannot be captured",
        where=where,
        advice=met.choice() if statement in ("if", None) else BRANCH_ADVICE[statement],
    )


# What a slice with a start or an end of the device ends up in.
CUTTING = ("__getitem__", "__setitem__", "narrow", "aten.copy_.default", "copy_.default")
# Torch functions through which Python asks a tensor for a value.
ASKING = {
    "__bool__",
    "__contains__",
    "__float__",
    "__index__",
    "__int__",
    "__iter__",
    "is_nonzero",
    "item",
    "numpy",
    "tolist",
}


def _deciding_op(traceback: TracebackType | None) -> str | None:
    """The op in whose trace the exception was raised; None when the user's own Python asked for the value."""
    called, op = None, None
    while traceback is not None:
        frame = traceback.tb_frame
        func = frame.f_locals.get("func")
        if is_user_file(frame.f_code.co_filename):
            called, op = None, None
        elif called is None and frame.f_code.co_name in ASKING:
            called = frame.f_code.co_name
        elif called is None and frame.f_code.co_name == "__torch_function__":
            called = getattr(func, "__name__", None)
        elif frame.f_code.co_name == "__torch_dispatch__" and isinstance(func, OpOverload) and op is None:
            op = str(func)
        traceback = traceback.tb_next
    return None if called is None or called in ASKING else op or called


def _needs_a_concrete_number(error: Exception) -> bool:
    text = str(error)
    marks = (
        "Could not extract specialized integer",
        "SymInt",
        "SymFloat",
        "symbolic",
        "data-dependent",
        "FakeTensor",
        "tensor subclasses",
        NUMPY_OBJECTS,
    )
    return any(mark in text for mark in marks)


KINDS: dict[type, str] = {ast.If: "if", ast.IfExp: "if", ast.While: "while", ast.For: "for", ast.Assert: "assert"}
ROUNDS_BEFORE_REFUSAL = 64


def statement_at(where: SourceLine | None) -> str | None:
    """The kind of statement ('if', 'while', 'for', 'assert') that owns the line, found in the file's syntax tree."""
    if where is None:
        return None
    for node in _statements("".join(linecache.getlines(where.file))):
        test = getattr(node, "test", getattr(node, "iter", None))
        if test is not None and test.lineno <= where.line <= (test.end_lineno or test.lineno):
            return KINDS[type(node)]
    return None


@functools.lru_cache(maxsize=64)
def _statements(source: str) -> list[ast.AST]:
    with contextlib.suppress(SyntaxError):
        return [node for node in ast.walk(ast.parse(source)) if type(node) in KINDS]
    return []


class LoopWatch:
    """Stops a trace in a `while` loop whose end only the device knows: sizes are taken to be at least 2, so it would
    never end."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[int, int], int] = {}

    def decided(self) -> None:
        """A size comparison was just decided by assumption.

        Raises:
            CaptureRefused: it is the test of a `while`, or one such loop has seen too many of them.
        """
        frame: FrameType | None = sys._getframe(1)
        innermost = True
        while frame is not None:
            if is_user_file(frame.f_code.co_filename):
                self._look(frame, innermost)
                innermost = False
            frame = frame.f_back

    def _look(self, frame: FrameType, innermost: bool) -> None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        first = frame.f_code.co_firstlineno
        for loop in _statements("".join(linecache.getlines(file))):
            if not isinstance(loop, ast.While) or not first <= loop.lineno <= line <= (loop.end_lineno or loop.lineno):
                continue
            key = (id(frame), loop.lineno)
            self.rounds[key] = self.rounds.get(key, 0) + 1
            in_test = innermost and loop.test.lineno <= line <= (loop.test.end_lineno or loop.test.lineno)
            if in_test or self.rounds[key] > ROUNDS_BEFORE_REFUSAL:
                raise CaptureRefused(
                    "Python control flow on a device value (a while loop that ends by a size) cannot be captured",
                    where=source_line(file, loop.lineno, frame.f_code.co_name),
                    advice=BRANCH_ADVICE["while"],
                )
