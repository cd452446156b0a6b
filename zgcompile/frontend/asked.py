"""What in the user's line asked Python for a number that only the device knows, and what to write there instead."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType, TracebackType

import torch

from zgcompile.errors import SourceLine
from zgcompile.ir.sizes import SYMBOLIC
from zgcompile.ir.source import is_user_file, source_line

HOST_LIBRARIES = ("math", "numpy", "random")
SHOWN = 60  # characters of an expression in a message

KEEP_A_TENSOR = "use it as a size or in tensor arithmetic, or keep it a tensor"
READING = "index, sum or compare the tensor with torch ops, or return it and read it outside the step"
TABLE = "make the list a tensor and index that: torch.tensor([...], device=...)[k]"
ROWS = (
    "index the rows instead of cutting them: rows = start + torch.arange(n, device=...); out[rows] = x, or y = x[rows]"
)
# NumPy and `random` names that torch spells otherwise.
DRAWS = {
    "torch.rand": ("rand", "random", "random_sample", "ranf", "sample", "uniform"),
    "torch.randn": ("randn", "normal", "standard_normal", "gauss", "normalvariate"),
    "torch.randint": ("choice", "choices", "integers", "randint", "randrange"),
    "torch.randperm": ("permutation", "permuted", "shuffle"),
}
CREATES = ("arange", "empty", "full", "ones", "zeros")
ARGUMENTS = {"torch.randint": "low, high, (n,)", "torch.full": "(n,), value"}


@dataclass(frozen=True)
class Asked:
    """The innermost user line of a traceback, and the expression of it that was being evaluated (None where the source
    cannot tell). `symbolic`: Python was given the traced number itself, not a tensor."""

    where: SourceLine
    expression: ast.expr | None
    frame: FrameType
    symbolic: bool
    library: str | None  # of HOST_LIBRARIES, where the expression calls into one

    @property
    def text(self) -> str:
        if self.expression is None:
            return ""
        text = ast.unparse(self.expression)
        return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."

    @property
    def called(self) -> str:
        """The last part of the name of what the expression calls, whatever it was imported as: "tolist" in
        `x.unique().tolist()`."""
        if not isinstance(self.expression, ast.Call):
            return ""
        callee = self.expression.func
        shown = callee.attr if isinstance(callee, ast.Attribute) else callee.id if isinstance(callee, ast.Name) else ""
        return getattr(_held(callee, self.frame), "__name__", shown)

    def passes_a_device_value(self) -> bool:
        """Whether a name in the arguments of the call holds a traced number or tensor."""
        if not isinstance(self.expression, ast.Call):
            return False
        arguments = [*self.expression.args, *(k.value for k in self.expression.keywords)]
        names = [n for a in arguments for n in ast.walk(a) if isinstance(n, ast.Name)]
        return any(isinstance(_held(n, self.frame), (*SYMBOLIC, torch.Tensor)) for n in names)

    def account(self) -> tuple[str, str] | None:
        """(what, advice) where the expression itself says enough; None for a statement's test and for other ops."""
        if self.called in ("tolist", "numpy") and self.library is None:
            return f"{self.text} reads a tensor of the device into the host's memory", READING
        if self.library == "math":
            return f"{self.text} works on a Python number, and this one only the device knows", self._math()
        if self.library is not None:
            name = {"numpy": "NumPy", "random": "random"}[self.library]
            return f"{self.text} calls {name} on the host with a number that only the device knows", self._host()
        if isinstance(self.expression, ast.Subscript) and self.symbolic:
            return f"{self.text} indexes a Python object by a number that only the device knows", TABLE
        return None

    def choice(self) -> str:
        """How to write a test of a traced number: the comparison itself as a tensor."""
        test = self.expression
        number = "n < 5"
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name):
            number = ast.unparse(test)
        left, _, rest = number.partition(" ")
        return (
            f"compute both sides and choose with torch.where(torch.tensor({left}, device=...) {rest}, a, b); "
            "of a size, only whether it is 0 or 1 may be tested"
        )

    def _math(self) -> str:
        argument = self.expression.args[0] if isinstance(self.expression, ast.Call) and self.expression.args else None
        if argument is None or not hasattr(torch, self.called):
            return KEEP_A_TENSOR
        number = ast.unparse(argument)
        if isinstance(_held(argument, self.frame), torch.Tensor):
            return f"torch.{self.called}({number})"
        tensor = f"torch.tensor({number}, dtype=torch.float32, device=...)"
        return f"torch.{self.called}({tensor}), and go on with that tensor"

    def _host(self) -> str:
        drawn = next((name for name, names in DRAWS.items() if self.called in names), None)
        if drawn is not None or self.called in CREATES:
            function = drawn or f"torch.{self.called}"
            return f"{function}({ARGUMENTS.get(function, 'n')}, device=...)"
        if hasattr(torch.Tensor, self.called):
            return f"torch.{self.called} of torch.tensor(n, device=...)"
        return "use torch functions on the step's device"


def asked(traceback: TracebackType | None) -> Asked | None:
    """What the innermost user frame of the traceback was evaluating; None without such a frame."""
    found, after = None, None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_user_file(file) and not file.endswith((".pyx", ".pxd", ".pxi")):  # Cython's frames carry bare names
            found, after = traceback, traceback.tb_next
        traceback = traceback.tb_next
    if found is None:
        return None
    frame, code = found.tb_frame, found.tb_frame.f_code
    expression = _expression(code, found.tb_lasti)
    where = source_line(code.co_filename, found.tb_lineno, code.co_name)
    symbolic = after is not None and isinstance(after.tb_frame.f_locals.get("self"), SYMBOLIC)
    return Asked(where, expression, frame, symbolic, _library(expression, frame, after))


def _expression(code: CodeType, instruction: int) -> ast.expr | None:
    """The smallest expression of the source around an instruction."""
    line, end_line, column, end_column = list(code.co_positions())[instruction // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    around = [
        node
        for node in _expressions("".join(linecache.getlines(code.co_filename)))
        if (node.lineno, node.col_offset) <= (line, column)
        and (node.end_lineno or 0, node.end_col_offset or 0) >= (end_line, end_column)
    ]
    return around[-1] if around else None  # each lies within the one before


@functools.lru_cache(maxsize=64)
def _expressions(source: str) -> list[ast.expr]:
    return list(_walked(source))


def _walked(source: str) -> Iterator[ast.expr]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.expr))


def _library(expression: ast.expr | None, frame: FrameType, after: TracebackType | None) -> str | None:
    if not isinstance(expression, ast.Call):
        return None
    if after is not None and after.tb_frame.f_code.co_filename.startswith("numpy/"):
        return "numpy"
    callee = _held(expression.func, frame)
    owner = type(getattr(callee, "__self__", None))
    homes = (getattr(callee, "__module__", None), owner.__module__, type(callee).__module__)
    roots = [str(home).split(".")[0] for home in homes]
    return next((root for root in roots if root in HOST_LIBRARIES), None)


def _held(node: ast.expr, frame: FrameType) -> object:
    """What a name, or a dotted name into a module or a random generator, stands for in the frame. Runs no user code."""
    if isinstance(node, ast.Name):
        for space in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in space:
                return space[node.id]
    elif isinstance(node, ast.Attribute):
        base = _held(node.value, frame)
        if isinstance(base, ModuleType) or type(base).__module__.split(".")[0] in HOST_LIBRARIES:
            return getattr(base, node.attr, None)
    return None
